# SPDX-License-Identifier: Apache-2.0
"""A container's bundle: its root file system and its config.json, which crun makes it of."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.reactors import IReactor
from infranetes_common.user_namespaces import UserNamespace, user_namespace
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from vmserver.containers import mount_checks
from vmserver.containers.apparmor import ProfileLoader
from vmserver.containers.exec_limits import check_executable
from vmserver.containers.oci.confinement import profile_reference
from vmserver.containers.oci.conmon import CannotRun
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.filesystems import FileSystems
from vmserver.containers.oci.image import image_defaults, stop_signal
from vmserver.containers.oci.index import ContainerIndex, unwritable
from vmserver.containers.oci.kernel import Kernel, find_kernel
from vmserver.containers.oci.limits import linux_resources
from vmserver.containers.oci.lookup import look_up
from vmserver.containers.oci.pod_processes import PodProcesses
from vmserver.containers.oci.record import OciRecord
from vmserver.containers.oci.rootfs_paths import make_directory, make_file
from vmserver.containers.oci.seccomp_filters import SeccompFilters
from vmserver.containers.oci.spec import NewContainer, container_spec, environment, pid_namespace
from vmserver.containers.oci.user_namespaces import FIELD, UserNamespaces, wanted_by
from vmserver.layers.images import LayerImages
from vmserver.pod_settings import SEEN_BY_CONTAINERS

CGROUPS = "/infranetes"  # the parent cgroup of the containers' cgroups

Document = dict[str, Any]  # Any: JSON made by `spec`


class Bundles:
    """Makes bundles.

    :param etc_dir: has the sandbox's hosts, hostname and resolv.conf.
    """

    def __init__(
        self,
        reactor: IReactor,
        index: ContainerIndex,
        images: LayerImages,
        files: FileSystems,
        namespaces: UserNamespaces,
        processes: PodProcesses,
        filters: SeccompFilters,
        etc_dir: Path,
    ) -> None:
        self._reactor = reactor
        self._index = index
        self._images = images
        self._files = files
        self._namespaces = namespaces
        self._processes = processes
        self._filters = filters
        self._sandbox_files = {f"/etc/{name}": etc_dir / name for name in SEEN_BY_CONTAINERS}
        self._profiles = ProfileLoader(reactor)
        self._kernel: Kernel | None = None

    def new(self, id: str, image_id: str, config: cri.ContainerConfig) -> OciContainer:
        """Return a container that has no files yet."""
        state = messages.ContainerState(
            id=id, state=cri.CONTAINER_CREATED, created_at=time.time_ns(), image_id=image_id
        )
        state.resources.CopyFrom(config.linux.resources)
        return self._index.new(OciRecord(state, config))

    async def make(self, container: OciContainer, sandbox_config: cri.PodSandboxConfig) -> None:
        """Make a container's directory, bundle and root file system.

        :raise InvalidArgument: the configuration is invalid or not supported; names the field.
        :raise FailedPrecondition: an image is not here, or the container whose processes it is to see does
            not run. :raise ResourceExhausted: the disk is full."""
        record, config = container.record, container.record.config
        _check_same_users(config, sandbox_config)
        image = image_defaults((await self._images.get(record.state.image_id)).configuration)
        record.stop_signal = stop_signal(config, image)
        kernel = await self.kernel()
        await self._files.make(container)
        paths = await self._files.volumes(config.mounts)
        await run_in_thread(self._reactor, _thd_make_names, container.root, self._sandbox_files, config)
        lookup = await run_in_thread(
            self._reactor, look_up, config, image, container.root, self._sandbox_files, paths
        )
        directories = await run_in_thread(
            self._reactor, _thd_make_volumes, container.root, lookup.volumes, wanted_by(config)
        )
        new_container = NewContainer(
            container.id,
            config,
            sandbox_config,
            image,
            container.root,
            lookup,
            kernel,
            f"{CGROUPS}/{container.id}",
            self._target(config),
            await self._init(config, kernel),
            directories if config.linux.security_context.readonly_rootfs else {},
            user_namespace=await self._namespaces.of(config),
        )
        spec = container_spec(new_container)
        await self._load_profile(config, kernel)
        user = lookup.user
        groups = list(dict.fromkeys((user.gid, *user.groups)))
        record.state.user.linux.CopyFrom(
            cri.LinuxContainerUser(uid=user.uid, gid=user.gid, supplemental_groups=groups)
        )
        await self._write(container, self._filters.added(spec))

    async def prepare(self, container: OciContainer) -> Document:
        """Make everything ready that a start needs and that time or a reboot of the VM may have changed.

        Return its config.json.

        :raise CannotRun: the kernel would not execute its command.
        :raise FailedPrecondition: an image is no longer here, or the container whose processes this one is to
            see does not run."""
        config, kernel = container.record.config, await self.kernel()
        await self._files.make(container)
        await self._files.volumes(config.mounts)
        await self._load_profile(config, kernel)
        options = config.linux.security_context.namespace_options
        pid = self._target(config) or await self._init(config, kernel)
        if options.pid == cri.TARGET and not pid:
            raise FailedPrecondition(
                f"container {options.target_id[:80]}, whose processes it is to see, is not running"
            )
        spec = await self.read(container)
        try:  # crun would find it out only after the start
            check_executable(spec["process"]["args"], spec["process"]["env"])
        except InvalidArgument as error:
            raise CannotRun(str(error), 126) from None
        if pid:
            linux = spec["linux"]
            linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "pid"]
            linux["namespaces"].append(pid_namespace(pid))
            await self._write(container, spec)
        return spec

    async def limit(self, container: OciContainer, limits: cri.LinuxContainerResources) -> None:
        """Give a container that does not run these limits."""
        spec = await self.read(container)
        spec["linux"]["resources"].update(linux_resources(limits, await self.kernel()))
        spec["process"]["oomScoreAdj"] = limits.oom_score_adj
        await self._write(container, spec)

    async def rename(self, container: OciContainer, config: cri.ContainerConfig, hostname: str) -> None:
        """Give commands that are executed in a running container another environment.

        :param config: has the new one. :param hostname: "": it stays.
        :raise InvalidArgument: a variable is malformed.
        :raise FailedPrecondition: its config.json can't be written."""
        spec = await self.read(container)
        image = image_defaults((await self._images.get(container.record.state.image_id)).configuration)
        kept = dict(each.partition("=")[::2] for each in spec["process"]["env"])
        names = hostname or kept.get("HOSTNAME", ""), kept.get("HOME", "/")
        spec["process"]["env"] = environment(config, image, *names)
        await self._write(container, spec)

    async def read(self, container: OciContainer) -> Document:
        """Return a container's config.json."""
        return await run_in_thread(self._reactor, _thd_read, container.bundle)

    async def kernel(self) -> Kernel:
        """Return the features of this VM's kernel."""
        if self._kernel is None:
            self._kernel = await run_in_thread(self._reactor, find_kernel)
        return self._kernel

    def _target(self, config: cri.ContainerConfig) -> int:
        """Return the first process of the container whose PID namespace it shares; 0 if that does not run."""
        options = config.linux.security_context.namespace_options
        target = self._index.get(options.target_id) if options.pid == cri.TARGET else None
        return target.record.state.pid if target is not None and target.running else 0

    async def _init(self, config: cri.ContainerConfig, kernel: Kernel) -> int:
        """Return the running init of the pod's processes; 0 if the container does not share them."""
        if config.linux.security_context.namespace_options.pid != cri.POD:
            return 0
        return await self._processes.get(await self._namespaces.of(config), kernel)

    async def _load_profile(self, config: cri.ContainerConfig, kernel: Kernel) -> None:
        reference = profile_reference(config.linux.security_context, kernel)
        if reference:
            await self._profiles.load(reference)

    async def _write(self, container: OciContainer, spec: Mapping[str, object]) -> None:
        await run_in_thread(self._reactor, _thd_write, container.bundle, json.dumps(spec))


def _check_same_users(config: cri.ContainerConfig, sandbox_config: cri.PodSandboxConfig) -> None:
    pods = user_namespace(sandbox_config.linux.security_context.namespace_options, "sandbox_config")
    if wanted_by(config) != pods:
        raise InvalidArgument(f"{FIELD}.userns_options: not those of the pod, whose containers share them")


def _thd_make_names(root: Path, files: Mapping[str, Path], config: cri.ContainerConfig) -> None:
    """Make files at which the pod's names (/etc/hosts, ...) are mounted, whatever the image has there.

    :param files: the pod's own, by their path in a container. kubelet may mount others there."""
    mounted = {mount_checks.target(mount) for mount in config.mounts if os.path.isfile(mount.host_path)}
    owner = _root_of(wanted_by(config))
    try:
        for path, file in files.items():
            if path in mounted or file.exists():
                make_file(root, path, *owner)
    except OSError as error:
        raise unwritable(root, error) from error


def _root_of(users: UserNamespace | None) -> tuple[int, int]:
    """Return the ids in the VM of a container's root."""
    return (0, 0) if users is None else (users.uids.first, users.gids.first)


def _thd_make_volumes(root: Path, paths: Iterable[str], users: UserNamespace | None) -> dict[str, Path]:
    """Make the directories that the image wants as volumes, unless it has them; return where they are.

    They are a part of the container's root, so what is written there counts as the container's, and what the
    image has there is seen. Only a root that is read-only has to have them mounted, to be written to.
    """
    owner = _root_of(users)
    try:
        made = {path: make_directory(root, path, *owner) for path in paths}
    except OSError as error:
        raise unwritable(root, error) from error
    return {path: directory for path, directory in made.items() if directory is not None}


def _thd_write(bundle: Path, text: str) -> None:
    file = bundle / "config.json"
    try:
        replace_file(file, text, durable=False)
    except OSError as error:
        raise unwritable(file, error) from error


def _thd_read(bundle: Path) -> Document:
    found: Document = json.loads((bundle / "config.json").read_bytes())
    return found
