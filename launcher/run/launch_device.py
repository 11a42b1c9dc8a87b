"""``launch.device`` and ``launch.backend`` on this machine."""

from __future__ import annotations

from launcher.errors import Problem, RequestError
from launcher.job.schema.job import Job
from launcher.plan.values.text import many


def device(job: Job, here: int) -> tuple[str, list[str]]:
    """Returns the device, and notes.

    ``auto`` is the accelerator if each of ``here`` ranks can have its own.
    """
    from launcher.runtime import device as devices

    requested, kind = job.launch.device, devices.accelerator()
    if requested == "auto":
        there = 0 if kind is None else devices.count(kind)
        if kind is None or there == 0:
            return devices.CPU, []
        chosen = kind if there >= here else devices.CPU
        why = f"{many(here, 'rank')} on this machine, torch sees {there} {kind}"
        return chosen, [f"launch.device auto -> {chosen}: {why}"]

    there = here if requested == devices.CPU else devices.count(requested)
    if there < here:
        text = f"{requested}: {here} ranks on this machine need a device each, but torch sees {there}"
        if kind is not None and kind != requested and devices.count(kind):
            text += f"; torch's accelerator is {kind}, of which it sees {devices.count(kind)}"
        raise RequestError((Problem("launch.device", text),))
    return requested, []


def backend(job: Job, where: str) -> str | None:
    """Returns the backend of ``launch.backend``, ``None`` for the device's default.

    Raises ``RequestError``.
    """
    from launcher.runtime import device as devices

    requested, own = job.launch.backend, devices.own_backend(where)
    if requested in ("auto", own):
        return None
    if requested == devices.GLOO and devices.takes(requested, where):
        return devices.GLOO
    place = "the CPU" if where == devices.CPU else where
    text = f"{requested}: the ranks of this run are on {place} and need {own or 'another backend'}"
    raise RequestError((Problem("launch.backend", text),))
