# SPDX-License-Identifier: Apache-2.0
"""The consoles of guests without our agent: serial ports that hosts write to files of a datastore.

vSphere shows serial ports in no other way that outlives a connection. vCenter reads such a file for whoever
may browse the datastore, while the VM writes to it, and does not delete it with the VM.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from pyVmomi import vim

from infranetes.providers.cloud.guests.tails import Tail
from infranetes.providers.cloud.interface import CloudError, ErrorKind, Leftover
from infranetes.providers.cloud.vsphere.driver import Driver
from infranetes.providers.cloud.vsphere.inventory import VCenterInventory
from infranetes.providers.cloud.vsphere.launches import _thd_wait_briefly
from infranetes.providers.cloud.vsphere.storage import Place
from infranetes.providers.cloud.vsphere.vms import VMs, token_of

KIND = "console"  # of leftovers
FOLDER = "infranetes-consoles"

_SUFFIX = ".log"


class Consoles:
    """Those of one node's VMs, whose names their files have. Methods are called in threads."""

    def __init__(self, inventory: VCenterInventory, vms: VMs) -> None:
        self._inventory = inventory
        self._vms = vms
        self._lock = threading.Lock()
        self._tails: dict[str, Tail] = {}  # by VMs' names

    def _thd_place(self, driver: Driver) -> Place:
        return self._inventory._thd_place(driver, FOLDER, "consoles_datastore")

    def _thd_path(self, driver: Driver, name: str) -> str:
        """Return the path of a new VM's file, in a folder that exists."""
        place = self._thd_place(driver)
        with suppress(vim.fault.FileAlreadyExists):
            driver.content.fileManager.MakeDirectory(place.path(), place.datacenter, True)
        return place.path(name + _SUFFIX)

    def _thd_read(self, driver: Driver, name: str) -> bytes:
        """Return what a VM wrote last, at least what is new; b"": nothing yet."""
        url = self._thd_place(driver).url(name + _SUFFIX)
        with self._lock:
            tail = self._tails.setdefault(name, Tail())
        try:
            return tail._thd_read(lambda begin, size: driver.session.fetch(url, begin, size))
        except CloudError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise
            return b""

    def _thd_delete(self, driver: Driver, name: str) -> None:
        """Ask to delete a VM's file. What can't be deleted now is a leftover."""
        place = self._thd_place(driver)
        with self._lock:
            self._tails.pop(name, None)
        driver.content.fileManager.DeleteDatastoreFile_Task(place.path(name + _SUFFIX), place.datacenter)

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        """Return the files of VMs of this node that are gone."""
        place = self._thd_place(driver)
        [(_, properties)] = driver.properties([place.datastore], "browser")
        spec = vim.host.DatastoreBrowser.SearchSpec(matchPattern=[f"{self._vms.prefix}*{_SUFFIX}"])
        task = properties["browser"].SearchDatastore_Task(place.path(), spec)
        ended, fault = _thd_wait_briefly(driver, task._moId, patient=True)
        if not ended or (fault is not None and fault.kind is ErrorKind.NOT_FOUND):
            return []  # it takes long, or there is no folder yet
        if fault is not None:
            raise fault
        [(_, properties)] = driver.properties([task], "info.result")
        names = [each.path.removesuffix(_SUFFIX) for each in properties["info.result"].file or ()]
        return [
            Leftover(name, KIND, token_of(name))
            for name in names
            if self._vms.is_name(name) and not self._vms.is_there(name)
        ]
