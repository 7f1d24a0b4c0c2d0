"""Ask several policies in order of priority; the first answer decides."""

from __future__ import annotations

from dispatchkit_composite.members import Member, MemberReport, members_from_pyproject
from dispatchkit_composite.policy import CompositePolicy

__version__ = "0.1.0"

__all__ = ["CompositePolicy", "Member", "MemberReport", "members_from_pyproject"]
