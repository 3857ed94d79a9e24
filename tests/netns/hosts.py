"""Hosts on this machine: network, processes and mounts of their own, sshd inside, one bridge."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

REPO = Path(__file__).parents[2]
BRIDGE = "hwbr0"
NETWORK = "10.78.0"
PACKAGES = ("openssh-server", "openssh-sftp-server", "rsync", "libwrap0", "libpopt0")
UP_S = 30.0


@dataclass
class Host:
    """init: process id of what is process 1 inside."""

    name: str
    address: str
    process: subprocess.Popen[bytes]
    init: int

    @property
    def cable(self) -> str:
        return f"hw-{self.name}"

    def run(
        self, command: str, timeout_s: float = 300.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A shell command on the host, as root; fails the test if it fails."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.init), "-a", "bash", "-lc", command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self._environment(),
        )
        said = f"on {self.name}: {command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        assert not check or done.returncode == 0, said
        return done

    def start(self, command: str) -> subprocess.Popen[str]:
        """The same in the background; its output is to be read by the caller."""
        return subprocess.Popen(
            ["nsenter", "-t", str(self.init), "-a", "bash", "-lc", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        return {
            "HOME": "/root",
            "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
        }

    def cut_cable(self) -> None:
        _ip("link", "set", self.cable, "down")

    def mend_cable(self) -> None:
        _ip("link", "set", self.cable, "up")

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.init).children(recursive=True)

    def kill_everything(self) -> int:
        """SIGKILL every process of the host but its sshd; how many those were."""
        victims = [p for p in self.processes() if p.name() != "sshd"]
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(victims)


class Hosts:
    """Context manager: hosts by name, on one bridge, under a folder of their own."""

    def __init__(self, lab: Path, names: tuple[str, ...]) -> None:
        self._lab = lab
        self._names = names
        self.by_name: dict[str, Host] = {}

    def __getitem__(self, name: str) -> Host:
        return self.by_name[name]

    def __enter__(self) -> Hosts:
        self._fetch_packages()
        key = self._lab / "id"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        _ip("link", "add", BRIDGE, "type", "bridge", check=False)
        _ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE, check=False)
        _ip("link", "set", BRIDGE, "up")
        try:
            for number, name in enumerate(self._names):
                self.by_name[name] = self._boot(name, f"{NETWORK}.{10 + number}")
            for host in self.by_name.values():
                self._await_ssh(host)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        for host in self.by_name.values():
            # Process 1 takes all others of its namespace with it.
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(host.init).kill()
            host.process.wait(30)
            _ip("link", "del", host.cable, check=False)
        _ip("link", "del", BRIDGE, check=False)

    def _fetch_packages(self) -> None:
        """Unpacked beside the system, not installed into it."""
        folder = self._lab / "deb"
        folder.mkdir(parents=True)
        subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            target = str(self._lab / "packages")
            subprocess.run(["dpkg", "-x", str(package), target], check=True)

    def _boot(self, name: str, address: str) -> Host:
        packages = sysconfig.get_path("purelib")
        with (self._lab / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *("unshare", "--net", "--pid", "--fork", "--mount", "--uts"),
                    *("--mount-proc", "--kill-child"),
                    *("bash", str(Path(__file__).with_name("host.sh")), name, address),
                    *(str(self._lab), packages, str(REPO), sys.base_prefix),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + UP_S
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline, f"{name} did not start"
            time.sleep(0.05)
        host = Host(name, address, process, children[0].pid)
        veth = ("type", "veth", "peer", "name", "eth0", "netns", str(host.init))
        _ip("link", "add", host.cable, *veth)
        _ip("link", "set", host.cable, "master", BRIDGE, "up")
        for command in (
            f"ip addr add {address}/24 dev eth0",
            "ip link set eth0 up",
            f"ip route add default via {NETWORK}.1",
        ):
            inside = ["nsenter", "-t", str(host.init), "-n", *shlex.split(command)]
            subprocess.run(inside, check=True)
        return host

    def _await_ssh(self, host: Host) -> None:
        deadline = time.monotonic() + UP_S
        probe = f"timeout 2 bash -c '</dev/tcp/{host.address}/22'"
        while host.run(probe, check=False).returncode:
            log = (self._lab / f"{host.name}.log").read_text()
            assert time.monotonic() < deadline, f"{host.name} has no sshd: {log}"
            time.sleep(0.2)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)
