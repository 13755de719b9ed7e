"""Network hosts whose packets are delayed, for kernels without netem.

    python benchmarks/delay_line.py 2 0.01 READY   # two hosts, 10 ms each way, until it is stopped

A process takes the place of the switch. Each host gets a TAP device. The process reads what a host
sends there, keeps it for the delay, and hands it to the destination host. Packets are as large as
the kernel makes them, because each packet costs this process time. The file READY appears once the
devices exist. Needs Linux and root; rig.py builds the hosts, and shapes the rates of the devices.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import sys
import time
from pathlib import Path

MTU = 65_000  # bytes of a packet
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
LONGEST_WAIT = 0.1  # seconds


def tap(namespace: str, name: str) -> int:
    """Creates a TAP device in a network namespace; returns the descriptor of its other end."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(there)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        return end
    finally:
        _enter(home)
        os.close(home)
        os.close(there)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def destinations(packet: bytes, source: int, count: int) -> list[int]:
    """Returns an Ethernet packet's hosts: one by the last byte of its address, or all others."""
    if packet[0] & 1:  # to all hosts, such as a request for an address
        return [host for host in range(count) if host != source]
    host = packet[5] - 1
    return [host] if 0 <= host < count and host != source else []


def hardware_address(host: int) -> str:
    """The address of a host's device, whose last byte says which host it is."""
    return f"02:00:00:00:00:{host + 1:02x}"


def relay(ends: list[int], delay: float) -> None:
    """Forwards packets `delay` seconds after they arrive; never returns."""
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    hosts = {end: host for host, end in enumerate(ends)}
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, host, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a device that is full, or not up, loses packets
                os.write(ends[host], packet)
        wait = min(waiting[0][0] - now, LONGEST_WAIT) if waiting else LONGEST_WAIT
        for end, _ in poll.poll(wait):
            try:
                packet = os.read(end, MTU + 100)
            except BlockingIOError:
                continue
            due = time.monotonic() + delay
            for host in destinations(packet, hosts[end], len(ends)):
                heapq.heappush(waiting, (due, next(order), host, packet))


def main() -> None:
    count, delay = int(sys.argv[1]), float(sys.argv[2])
    ends = [tap(f"cgx_h{host}", f"cgx_v{host}") for host in range(count)]
    Path(sys.argv[3]).touch()  # the devices are there
    relay(ends, delay)


if __name__ == "__main__":
    main()
