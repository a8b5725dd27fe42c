"""The machine that a measurement is of: its name, its memory in use, the energy it reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_POWERCAP = Path("/sys/class/powercap")


def describe() -> dict[str, Any]:
    """What a table of measurements has to name."""
    import torch
    import transformers

    import anydraft

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "anydraft": anydraft.__version__,
    }


def cpu_name() -> str:
    """The processor's name, with its widest instruction set where that is known."""
    name, flags = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            if key.strip() == "flags":
                flags = value
                break
    except OSError:
        return name
    # Cloud machines often hide the model; what decides speed here is the instruction set.
    known = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    widest = next((label for flag, label in known.items() if flag in flags.split()), "")
    return f"{name} ({widest})" if widest else name


def memory_in_use() -> int:
    """Bytes of main memory that this process holds, plus GPU memory that it has allocated."""
    import psutil
    import torch

    held: int = psutil.Process().memory_info().rss
    return held + (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)


class EnergyMeter:
    """Joules that the processors have used, where Linux says so (RAPL), which may need rights.

    Args:
        root: the folder of the power zones; another one in tests.
    """

    def __init__(self, root: Path = _POWERCAP) -> None:
        # The top-level zones are the packages; their parts ("intel-rapl:0:1") are within them.
        zones = [zone for zone in sorted(root.glob("*-rapl:*")) if zone.name.count(":") == 1]
        self._zones = [zone for zone in zones if _number(zone / "energy_uj") is not None]
        self._last: list[int] = []
        self.read()

    @property
    def available(self) -> bool:
        return bool(self._zones)

    def read(self) -> float | None:
        """Joules since the last reading; None where the machine does not say."""
        if not self._zones:
            return None
        now = [_number(zone / "energy_uj") or 0 for zone in self._zones]
        total = 0
        for zone, before, after in zip(self._zones, self._last or now, now, strict=True):
            spent = after - before
            if spent < 0:  # the counter wrapped
                spent += _number(zone / "max_energy_range_uj") or 0
            total += spent
        self._last = now
        return total / 1e6


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
