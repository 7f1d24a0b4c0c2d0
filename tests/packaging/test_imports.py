"""Rules of imports that the contracts in pyproject.toml cannot express."""

from __future__ import annotations

import pytest

grimp = pytest.importorskip("grimp")


def test_no_module_imports_a_package_that_it_lies_in() -> None:
    """A contract excludes cycles between siblings; this test excludes cycles through a package."""
    graph = grimp.build_graph("dispatchkit", exclude_type_checking_imports=False, cache_dir=None)
    modules = graph.modules
    assert len(modules) > 100
    found = [
        f"{module} -> {imported}"
        for module in sorted(modules)
        for imported in graph.find_modules_directly_imported_by(module)
        if module.startswith(f"{imported}.")
    ]
    assert found == []
