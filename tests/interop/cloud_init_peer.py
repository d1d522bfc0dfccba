# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Reads CDs, and vSphere's guestinfo, as cloud-init does, and prints what it understood.

Run by the Python that cloud-init is for:
python3 cloud_init_peer.py nocloud|configdrive|guestinfo DIRECTORY
"""

import json
import pathlib
import sys
import tempfile

from cloudinit import handlers, helpers, user_data
from cloudinit.config.schema import SchemaValidationError, get_schema, validate_cloudconfig_schema
from cloudinit.distros import rhel
from cloudinit.handlers.cloud_config import CloudConfigPartHandler
from cloudinit.net import eni, netplan, network_state, networkd, sysconfig
from cloudinit.sources import DataSourceConfigDrive, DataSourceNoCloud, DataSourceVMware
from cloudinit.sources.helpers import openstack

MAC = "52:54:00:ab:cd:ef"


def read(kind, directory, paths):
    """Return meta-data, user-data and the network's configuration as a data source has them."""
    if kind == "configdrive":
        found = DataSourceConfigDrive.read_config_drive(directory)
        network = openstack.convert_net_json(found["networkdata"], known_macs={MAC: "ens3"})
        return found["metadata"], found.get("userdata") or b"", network
    if kind == "guestinfo":
        value = {path.name: path.read_text() for path in pathlib.Path(directory).iterdir()}
        said = {
            key: DataSourceVMware.decode(key, value[f"guestinfo.{key}.encoding"], value[f"guestinfo.{key}"])
            for key in ("metadata", "userdata")
        }
        meta = DataSourceVMware.process_metadata(DataSourceVMware.load_json_or_yaml(said["metadata"]))
        return meta, said["userdata"], meta["network"]["config"]
    found = DataSourceNoCloud.util.pathprefix2dict(
        directory, required=["user-data", "meta-data"], optional=["vendor-data", "network-config"]
    )
    merged = DataSourceNoCloud._merge_new_seed({"meta-data": {}, "user-data": ""}, found)
    return merged["meta-data"], merged["user-data"], merged["network-config"]


def understood(raw, paths):
    """Return the merged cloud-config, what its schema says of it, and the other parts."""
    handler = CloudConfigPartHandler(paths, cloud_config_path="cloud_config")
    handler.handle_part(None, handlers.CONTENT_START, None, None, None, {})
    others = []
    for part in user_data.UserDataProcessor(paths).process(raw).walk():
        if part.is_multipart():
            continue
        kind = part.get_content_type()
        text = user_data.util.fully_decoded_payload(part)
        if kind == "text/cloud-config":
            handler.handle_part(None, kind, part.get_filename(), text, None, dict(part))
        else:
            others.append([kind, text])
    config = handler.cloud_buf or {}
    try:
        validate_cloudconfig_schema(config, get_schema(), strict=True)
        faults = ""
    except SchemaValidationError as error:
        faults = str(error)
    return config, faults, others


def rendered(network):
    """Return the files that each kind of system gets, by the kind."""
    network_state.find_interface_name_from_mac = lambda mac: "ens3" if mac == MAC else None
    found = {}
    for renderer in (
        eni.Renderer({"eni_path": "etc/network/interfaces"}),
        netplan.Renderer({"netplan_path": "netplan.yaml"}),
        networkd.Renderer({"network_conf_dir": "/networkd/"}),
        sysconfig.Renderer(rhel.Distro.renderer_configs["sysconfig"]),
    ):
        with tempfile.TemporaryDirectory() as top:
            state = network_state.parse_net_config_data(network, renderer=renderer)
            renderer.render_network_state(state, target=top)
            files = sorted(path for path in pathlib.Path(top).rglob("*") if path.is_file())
            name = type(renderer).__module__.rpartition(".")[2]
            found[name] = "\n".join(path.read_text() for path in files)
    return found


def answer(kind, directory):
    """Return all that is understood of one CD."""
    with tempfile.TemporaryDirectory() as cloud:
        paths = helpers.Paths({"cloud_dir": cloud, "run_dir": cloud})
        meta, raw, network = read(kind, directory, paths)
        config, faults, others = understood(raw, paths)
        network = rendered(network)
    return {"meta": meta, "config": config, "faults": faults, "others": others, "network": network}


asked = sys.argv[1:]
print(json.dumps([answer(*each) for each in zip(asked[::2], asked[1::2], strict=True)], default=str))
