# mypy: disable-error-code="override"
"""Distinct streams of a virtual card: the allocator caches memory per stream.

Trainers on many cards gather weights and reduce gradients on side streams; so reserved bytes are the sum of each
stream's peak, more than the peak of the sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

import torch

from hybridtrain.virtual_gpu.facade.cuda_module import VirtualStream
from hybridtrain.virtual_gpu.facade.virtual_ledger import VirtualLedger


class VirtualStreams:
    """The streams of ``torch.cuda``."""

    def __init__(self, ledger: VirtualLedger) -> None:
        streams, numbers = self, count(0)
        self._ledger = ledger

        class Stream(VirtualStream):
            """A stream with its own number; the first is 0."""

            def __init__(self, *_args: Any, **_kwargs: Any) -> None:
                self.stream_id = self.cuda_stream = next(numbers)
                self._outer: list[VirtualStream] = []

            def __enter__(self) -> Self:
                self._outer.append(streams.current)
                streams.select(self)
                return self

            def __exit__(self, *_args: object) -> None:
                streams.select(self._outer.pop())

            def wait_stream(self, other: VirtualStream) -> None:
                ledger.await_op(self.stream_id, ledger.last_op(other.stream_id))

            def wait_event(self, event: VirtualStream) -> None:
                ledger.await_op(self.stream_id, getattr(event, "op", -1))

            def record_event(self, event: VirtualStream | None = None) -> VirtualStream:
                found = event or Event()
                found.op = ledger.last_op(self.stream_id)  # type: ignore[attr-defined]
                return found

        class Event(VirtualStream):
            """An event on a stream, which others wait for."""

            op = -1

            def record(self, stream: VirtualStream | None = None) -> Self:
                (stream or streams.current).record_event(self)
                return self

            def wait(self, stream: VirtualStream | None = None) -> None:
                (stream or streams.current).wait_event(self)

        self.first: VirtualStream = Stream()
        self.current: VirtualStream = self.first
        self._kind, self._event = Stream, Event

    def select(self, stream: VirtualStream | None) -> None:
        """Make a stream current."""
        if stream is not None:
            self.current = stream
            self._ledger.stream = stream.stream_id

    @contextmanager
    def working_on(self, stream: VirtualStream | None) -> Iterator[None]:
        """Make a stream current inside the block; None: no change."""
        outer = self.current
        self.select(stream)
        try:
            yield
        finally:
            self.select(outer)

    def names(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the replacements: owner, name, value."""
        yield torch.cuda, "Stream", self._kind
        yield torch.cuda, "Event", self._event
        yield torch.cuda, "stream", self.working_on
        yield torch.cuda, "set_stream", self.select
        yield torch.cuda, "default_stream", lambda *_args: self.first
        for owner in (torch.cuda, torch.accelerator):
            yield owner, "current_stream", lambda *_args: self.current
