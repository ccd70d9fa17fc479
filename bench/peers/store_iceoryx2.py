"""iceoryx2: zero-copy publish and subscribe.

It has no registry of objects, so a "put" is loan, copy and send, a "get" receives, a "free" gives
the sample back to its publisher.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import iceoryx2 as iox2
import numpy as np

from bench.objects import MIB, ROUNDS, SIZES_QUICK, Bytes, object_rows
from bench.peers import emit

IN_FLIGHT = max(batch for batch, _ in ROUNDS.values())


class Topic:
    """One service with one publisher and one subscriber in this process."""

    name = "iceoryx2"

    def __init__(self) -> None:
        iox2.set_log_level(iox2.LogLevel.Error)
        self._node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        service = (
            self._node.service_builder(iox2.ServiceName.new(f"bench/{os.getpid()}"))
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .subscriber_max_buffer_size(IN_FLIGHT)
            .subscriber_max_borrowed_samples(IN_FLIGHT)
            .create()
        )
        self._service = service
        self._publisher = (
            service.publisher_builder()
            .initial_max_slice_len(64 * MIB)
            .allocation_strategy(iox2.AllocationStrategy.PowerOfTwo)
            .create()
        )
        self._subscriber = service.subscriber_builder().create()

    def put(self, value: Bytes) -> list[Any]:
        """Loan, copy, send; the list will hold the received sample."""
        loan = self._publisher.loan_slice_uninit(value.nbytes)
        payload = loan.payload()
        ctypes.memmove(payload.data_ptr, value.ctypes.data, value.nbytes)
        loan.assume_init().send()
        return []

    def get(self, handle: list[Any]) -> Bytes:
        """Receive the next sample."""
        sample = self._subscriber.receive()
        handle.append(sample)
        return np.asarray(sample.payload().as_memory_view()).view(np.uint8)

    def free(self, handle: list[Any]) -> None:
        """Give the sample back."""
        handle.pop().delete()

    def free_many(self, handles: list[list[Any]]) -> None:
        """One by one."""
        for handle in handles:
            self.free(handle)


def main() -> int:
    """Rows of put, get and free."""
    return emit(object_rows(Topic(), SIZES_QUICK, "--quick" in sys.argv))


if __name__ == "__main__":
    sys.exit(main())
