"""The seconds of a training step on a card that is not here: a roofline of its data sheet.

An operator takes max(operations / rate, bytes / bandwidth), and begins when the one before it has ended and the host
has come to it. The host takes QUEUE for each, and bytes / HOST_RATE for those of its own, such as a step of parameters
that are there; it waits where the program reads a value. Copies between host and card go at the link's rate: the
default stream's one after another with operators; those of other streams, both ways at once, beside the operators of
their segment (a forward pass, a backward pass, the rest of the step), and what they outlast these by is added. So is
what a disk reads and writes at DISK_RATE, beside both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memopt._estimate.cards import Rates

QUEUE = 5e-6  # seconds of the host for an operator: what torch's dispatch and a launch commonly take
HOST_RATE = 20e9  # bytes a second that the host reads and writes
DISK_RATE = 2e9  # and a disk, by turns
WAIT = "wait"  # the kind of an operator that the host waits for
HOST = "host"  # and of one that it runs itself

LEFT_OUT = "caches, kernels that torch.compile makes, other ranks, and what the host does besides"


@dataclass
class Segment:
    """A part of a step.

    Attributes:
        operators: Kind (of Rates.operations, WAIT or HOST), operations and bytes of each, in their order.
        kernel_bytes: Read and written by memopt's own kernels.
        host_bytes: Read and written by memopt's own steps of parameters on the host.
        to_device: Bytes that were copied from the host, all in all; to_host: to it.
        disk_bytes: Read from and written to a disk, of an optimizer's states.
        side_to_device: Those of them on other streams than the default one; side_to_host likewise.
    """

    operators: list[tuple[str, float, float]] = field(default_factory=list)
    kernel_bytes: int = 0
    host_bytes: int = 0
    to_device: int = 0
    to_host: int = 0
    disk_bytes: int = 0
    side_to_device: int = 0
    side_to_host: int = 0


def seconds(step: Iterable[Segment] | None, rates: Rates) -> float:
    """Return the seconds of a step; 0 of one that was not seen whole."""
    device = host = 0.0
    for segment in step or ():
        begun = device
        for kind, operations, size in segment.operators:
            host += QUEUE
            if kind == WAIT:
                host = max(host, device)
            elif kind == HOST:
                host += size / HOST_RATE
            else:
                took = max(operations / rates.operations(kind), size / rates.memory)
                device = max(device, host) + took
        host += segment.host_bytes / HOST_RATE
        device += segment.kernel_bytes / rates.memory
        link = max(segment.side_to_device, segment.side_to_host) / rates.link
        exposed = max(0.0, max(link, segment.disk_bytes / DISK_RATE) - (device - begun))
        plain = segment.to_device + segment.to_host - segment.side_to_device - segment.side_to_host
        device += plain / rates.link + exposed
    return max(device, host)
