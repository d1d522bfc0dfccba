# SPDX-License-Identifier: Apache-2.0
"""grpcio on the other side, in a process of its own: never imported by the tests.

python -m tests.interop.grpcio_peer server SOCKET     serves Demo; says "ready"
python -m tests.interop.grpcio_peer SCENARIO SOCKET   calls Demo; prints what it saw as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import grpc

from tests.txgrpc.demo import DEMO, Note

OPTIONS = [
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.enable_retries", 0),
]
NAME = DEMO.full_name


def method(channel: Any, name: str) -> Any:
    """A grpcio multicallable for a method of Demo."""
    described = DEMO.methods_by_name[name]
    up = "stream" if described.client_streaming else "unary"
    down = "stream" if described.server_streaming else "unary"
    return getattr(channel, f"{up}_{down}")(
        f"/{NAME}/{name}", request_serializer=Note.SerializeToString, response_deserializer=Note.FromString
    )


async def failure(call: Any) -> dict[str, Any]:
    """The status of a call that has to fail."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        trailing = {k: v.hex() if isinstance(v, bytes) else v for k, v in error.trailing_metadata() or ()}
        return {"code": error.code().name, "message": error.details(), "trailing": trailing}
    except asyncio.CancelledError:
        return {"code": "CANCELLED", "message": "locally", "trailing": {}}
    return {"code": "OK", "message": "", "trailing": {}}


async def kinds(channel: Any) -> Any:
    """All four kinds of call."""
    unary = await method(channel, "Echo")(Note(text="hello"))
    down = [note.number async for note in method(channel, "Count")(Note(number=50))]
    up = await method(channel, "Sum")(Note(number=n) for n in range(50))
    chat = method(channel, "Chat")()
    heard = []
    for word in ("one", "two", "three"):
        await chat.write(Note(text=word))
        heard.append((await chat.read()).text)
    await chat.done_writing()
    rest = await chat.read()
    return {
        "unary": unary.text,
        "down": down,
        "up": up.number,
        "chat": heard,
        "end": rest == grpc.aio.EOF,
        "code": (await chat.code()).name,
    }


async def statuses(channel: Any) -> Any:
    """Every status, with a message that needs encoding and binary trailing metadata."""
    fail = method(channel, "Fail")
    return [await failure(fail(Note(number=code, text="grün 100% \n\x7f"))) for code in range(1, 17)]


async def stream_status(channel: Any) -> Any:
    """A status after some responses, and a method that is not there."""
    return [
        await failure(method(channel, "Count")(Note(number=3, text="after three"))),
        await failure(method(channel, "Missing")(Note())),
        await failure(channel.unary_unary("/no.Such/Service")(b"")),
        await early_end(channel),
    ]


async def early_end(channel: Any) -> dict[str, Any]:
    """The status of a call that ends while there is more to be said. grpcio's client makes one up when it
    writes before it has heard of the end, with its own server too: then the same again."""
    seen: dict[str, Any] = {}
    for _ in range(20):
        seen = await failure(method(channel, "Sum")([Note(number=1), Note(text="enough")] * 100))
        if seen["message"] != "Internal error from Core":
            break
    return seen


async def large(channel: Any) -> Any:
    """Large messages both ways, and one over the server's limit."""
    blob = bytes(range(256)) * 4 * 2048  # 2 MiB: more windows than one, and no long turn of the reactor
    echoed = await method(channel, "Echo")(Note(blob=blob))
    count = 0
    async for note in method(channel, "Count")(Note(number=20, blob=b"x" * 500_000)):
        count += len(note.blob)
    up = await method(channel, "Sum")(Note(number=1, blob=b"y" * 500_000) for _ in range(20))
    over = await failure(method(channel, "Echo")(Note(blob=b"z" * (16 * 1024 * 1024 + 1))))
    after = await method(channel, "Echo")(Note(text="still here"))
    return {"same": echoed.blob == blob, "count": count, "up": up.number, "over": over, "after": after.text}


async def metadata(channel: Any) -> Any:
    """Text and binary metadata, repeated names."""
    sent = (("x-text", "a b, c"), ("x-text", "two"), ("x-raw-bin", bytes(range(256))), ("x-raw-bin", b""))
    call = method(channel, "Echo")(Note(), metadata=sent)
    await call
    return [[k, v.hex() if isinstance(v, bytes) else v] for k, v in await call.trailing_metadata()]


async def deadlines(channel: Any) -> Any:
    """Deadlines of all kinds of call, and one that is met."""
    met = await method(channel, "Wait")(Note(number=10), timeout=20)
    chat = method(channel, "Chat")(timeout=0.3)
    await chat.write(Note(text="x"))
    return [
        (await failure(method(channel, "Wait")(Note(), timeout=0.3)))["code"],
        (await failure(chat))["code"],
        met.number,
    ]


async def cancellation(channel: Any) -> Any:
    """Cancelled calls of each kind; the channel serves on."""
    wait = method(channel, "Wait")(Note())
    count = method(channel, "Count")(Note(number=10**6, blob=b"x" * 10_000))
    await count.read()
    chat = method(channel, "Chat")()
    await chat.write(Note(text="x"))
    await chat.read()
    await asyncio.sleep(0.2)
    for call in (wait, count, chat):
        call.cancel()
    codes = [(await call.code()).name for call in (wait, count, chat)]
    return {"codes": codes, "after": (await method(channel, "Echo")(Note(text="on"))).text}


async def many(channel: Any) -> Any:
    """200 calls at once, then 200 streams at once."""
    wait = method(channel, "Wait")
    notes = await asyncio.gather(
        *(wait(Note(number=n % 20 + 1, text=str(n)), timeout=60) for n in range(200))
    )

    async def length(n: int) -> int:
        return len([note async for note in method(channel, "Count")(Note(number=n), timeout=60)])

    return {
        "unary": [note.text for note in notes] == [str(n) for n in range(200)],
        "streams": await asyncio.gather(*(length(n) for n in range(200))) == list(range(200)),
    }


async def compressed(channel: Any) -> Any:
    """A client that compresses."""
    call = method(channel, "Echo")(Note(text="x" * 1000), compression=grpc.Compression.Gzip)
    return [await failure(call), (await method(channel, "Echo")(Note(text="plain"))).text]


async def headers(channel: Any) -> Any:
    """A header list over the limit fails its call alone."""
    over = await failure(method(channel, "Echo")(Note(), metadata=[("x-long", "v" * 20_000)]))
    return [over["code"], (await method(channel, "Echo")(Note(text="on"))).text]


async def drain(channel: Any) -> Any:
    """A call that runs while the server drains, and one begun after."""
    running = method(channel, "Wait")(Note(number=700, text="finished"), timeout=30)
    await asyncio.sleep(0.1)
    print("running", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    answer = await running
    return [answer.text, (await failure(method(channel, "Echo")(Note(), timeout=2)))["code"]]


async def serve(path: str) -> None:
    """Demo on grpcio's asyncio server."""
    server = grpc.aio.server(options=OPTIONS)

    async def echo(request: Any, context: Any) -> Any:
        context.set_trailing_metadata(
            [(k, v) for k, v in context.invocation_metadata() if k.startswith("x-")]
        )
        return request

    async def fail(request: Any, context: Any) -> Any:
        codes = {code.value[0]: code for code in grpc.StatusCode}
        await context.abort(codes[request.number], request.text, (("x-why-bin", b"\0\xff"),))

    async def wait(request: Any, context: Any) -> Any:
        await asyncio.sleep(request.number / 1000 if request.number else 3600)
        return Note(number=request.number, text=request.text or str(context.time_remaining()))

    cancelled: list[str] = []

    async def count(request: Any, context: Any) -> Any:
        try:
            for number in range(request.number):
                yield Note(number=number, blob=request.blob)
            if request.text:
                await context.abort(grpc.StatusCode.ABORTED, request.text)
        finally:
            cancelled.append("Count")

    async def total(requests: Any, context: Any) -> Any:
        number = 0
        async for request in requests:
            number += request.number
            if request.text:
                await context.abort(grpc.StatusCode.ABORTED, request.text)
        return Note(number=number)

    async def chat(requests: Any, context: Any) -> Any:
        async for request in requests:
            if request.text == "bye":
                return
            if request.text == "cancelled?":
                yield Note(text=",".join(cancelled))
            else:
                yield Note(text=request.text.upper(), number=request.number)

    def handler(kind: str, behaviour: Any) -> Any:
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            behaviour, request_deserializer=Note.FromString, response_serializer=Note.SerializeToString
        )

    handlers = {
        "Echo": handler("unary_unary", echo),
        "Fail": handler("unary_unary", fail),
        "Wait": handler("unary_unary", wait),
        "Count": handler("unary_stream", count),
        "Sum": handler("stream_unary", total),
        "Chat": handler("stream_stream", chat),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await server.stop(5)


async def scenario(name: str, channel: Any) -> None:
    """Run one of the scenarios above and print what it returns."""
    async with channel:
        print(json.dumps(await globals()[name](channel)), flush=True)


def connect(target: str, directory: str | None) -> Any:
    """A channel to a unix socket, or by TLS to a port."""
    if directory is None:
        return grpc.aio.insecure_channel(f"unix:{target}", options=OPTIONS)
    ca, certificate, key = (Path(directory, name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", "server.test")]
    return grpc.aio.secure_channel(f"127.0.0.1:{target}", credentials, options=options)


async def main(role: str, target: str, directory: str | None = None) -> None:
    if role == "server":
        await serve(target)
    else:
        await scenario(role, connect(target, directory))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
