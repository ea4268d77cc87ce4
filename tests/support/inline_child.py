"""A child that is none: the work is done in this process, without seconds of torch's import each."""

from importlib import import_module
from typing import Any

from hybridvalidation.runs.child import Ended


class InlineChild:
    """Takes what ``Child`` takes."""

    def __init__(self, work: str, job: object, answer: type, **_options: Any) -> None:
        module, _, name = work.partition(":")
        found = getattr(import_module(module), name)(job)
        assert isinstance(found, answer)
        self._ended: Ended[Any] = Ended(answer=found, fault="", seconds=0.1, peak_rss_bytes=0, log="")

    def poll(self) -> Ended[Any]:
        return self._ended

    def wait(self) -> Ended[Any]:
        return self._ended

    def stop(self) -> None:
        pass
