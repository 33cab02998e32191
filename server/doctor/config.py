"""Settings of `swell doctor`; see `engine.shared.config.section` for the conventions."""

from typing import Annotated

from msgspec import Meta

from engine.shared.config import Section


class DoctorTarget(Section, frozen=True, kw_only=True):
    """Doctor"""

    host: Annotated[str, "Address on which a server would listen."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535), "Port on which a server would listen."] = 8000


class DoctorConfig(Section, frozen=True, kw_only=True):
    """All that `swell doctor` needs to know."""

    doctor: DoctorTarget = DoctorTarget()
