"""What a release's number says where neither signatures nor fields do."""

from __future__ import annotations

import pytest

from bireme.engines.trtllm.api import is_since

IN_ORDER = ["1.1.0", "1.2.0rc3", "1.2.0", "1.2.1", "1.3", "1.3.0rc5", "1.3.0rc26", "1.3.0rc29", "1.3.0", "1.4.0rc1"]


@pytest.mark.parametrize("at", range(len(IN_ORDER)))
def test_candidates_come_before_their_release_and_after_the_last(at):
    assert [is_since(other, IN_ORDER[at]) for other in IN_ORDER] == [False] * at + [True] * (len(IN_ORDER) - at)


@pytest.mark.parametrize("version", ["1.3.0rc29.dev20260901", "1.3.0rc29+g1234", "main"])
def test_builds_count_as_the_release_that_they_are_named_after(version):
    assert is_since(version, "1.3.0rc29")
