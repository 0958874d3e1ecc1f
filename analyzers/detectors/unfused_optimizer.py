"""An optimizer whose operators read and write its tensors again and again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.detectors.fusible_kernels import LEAST_RATIO, fused
from chopper.analyzers.events.device import Events
from chopper.wording import percent

_ALONE = re.compile(r"aten::(_foreach_|_fused_)")
DETECTOR = detector("unfused_optimizer", least=percent(LEAST_RATIO, ".0f"))


def unfused_optimizer(run: Attributed, events: Events) -> Iterator[Sighting]:
    """PIECE, DEVICE_EVENT -> at most one sighting."""
    yield from fused("unfused_optimizer", run, events, ("compute.optimizer",), _ALONE)
