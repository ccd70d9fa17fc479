"""Reading a process's memory from /proc. Pure; used by agents and by the hub."""

from __future__ import annotations

from pathlib import Path

__all__ = ["process_memory"]


def process_memory(pid: int) -> dict[str, int]:
    """{"rss_bytes", "pss_bytes"}; empty when the process is gone. PSS shares common pages out."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {}
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss"):
            found[f"{name.lower()}_bytes"] = int(rest.split()[0]) * 1024
    return found
