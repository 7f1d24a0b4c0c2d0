"""Reports: self-contained HTML files about traces, simulations and live runners.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.lazy import lazy_names

if TYPE_CHECKING:
    from dispatchkit_plan.report.account import Account, AccountedDecision, account_for
    from dispatchkit_plan.report.from_account import report_of_account, waste_plan
    from dispatchkit_plan.report.from_simulations import report_of_simulations
    from dispatchkit_plan.report.live import LiveStatistics, report_of_statistics
    from dispatchkit_plan.report.page import Report, render
    from dispatchkit_plan.report.write import write_report

_LAZY_NAMES = {
    "Account": "account",
    "AccountedDecision": "account",
    "LiveStatistics": "live",
    "Report": "page",
    "account_for": "account",
    "render": "page",
    "report_of_account": "from_account",
    "report_of_simulations": "from_simulations",
    "report_of_statistics": "live",
    "waste_plan": "from_account",
    "write_report": "write",
}

__all__ = [
    "Account",
    "AccountedDecision",
    "LiveStatistics",
    "Report",
    "account_for",
    "render",
    "report_of_account",
    "report_of_simulations",
    "report_of_statistics",
    "waste_plan",
    "write_report",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY_NAMES)
