"""Every dialect meets the contract of policies and the traits that it claims."""

from __future__ import annotations

import pytest

from dispatchkit.testing import PolicyTests, run_policy_conformance

from dispatchkit_vllm import DIALECTS, VllmPolicy


class TestVllm(PolicyTests):
    def make_policy(self) -> VllmPolicy:
        return VllmPolicy()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DIALECTS.keys() - {"vllm"}))
def test_dialect_keeps_the_contract(name: str) -> None:
    verdict = run_policy_conformance(lambda: VllmPolicy(name))
    assert verdict.passed, str(verdict)
