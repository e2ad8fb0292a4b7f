from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme import disagg
from bireme.disagg import MAX_BYTES, DisaggregatedParams, prompt_digest, seal, sign, unseal
from bireme.errors import RequestError
from bireme.messages import TokenLogprob

KEY = bytes(range(32))
PARAMS = DisaggregatedParams(
    worker="prefill",
    life=3,
    lease_id=2**63 - 1,
    generation=5,
    num_tokens=17,
    first_gen_tokens=(42,),
    first_gen_log_probs=([TokenLogprob(42, -0.5, 3), TokenLogprob(7, -1.25)],),
    opaque_state=base64.b64encode(b"state").decode(),
)


def test_what_is_sealed_comes_back():
    assert unseal(seal(PARAMS, KEY), KEY) == PARAMS


def test_the_wire_form_is_ascii():
    assert seal(PARAMS, KEY).isascii()


def test_another_deployments_key_is_refused():
    with pytest.raises(RequestError, match="bad signature"):
        unseal(seal(PARAMS, KEY), bytes(32))


@given(st.data())
def test_no_byte_can_be_changed(data):
    blob = bytearray(seal(PARAMS, KEY))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RequestError):
        unseal(bytes(blob), KEY)


@given(st.integers(0, len(seal(PARAMS, KEY)) - 1))
def test_no_beginning_of_it_is_accepted(length):
    with pytest.raises(RequestError, match="bad signature"):
        unseal(seal(PARAMS, KEY)[:length], KEY)


@pytest.mark.parametrize("blob", [b"", b".", b"....", b"\xff\xfe.\x00", b"e30=.", seal(PARAMS, KEY) + b"\n"])
def test_garbage_is_refused(blob):
    with pytest.raises(RequestError, match="pass on what this deployment's prefill returned"):
        unseal(blob, KEY)


def test_signed_text_that_is_no_utf_8_is_the_callers_error():
    with pytest.raises(RequestError, match="disaggregated_params: 'utf-8' codec can't decode"):
        unseal(sign(b'{"worker":"pre\xfffill"}', KEY, disagg.PARAMS), KEY)


def test_what_is_signed_for_another_purpose_is_refused():
    payload = msgspec.json.encode(PARAMS)
    assert unseal(sign(payload, KEY, disagg.PARAMS), KEY) == PARAMS
    with pytest.raises(RequestError, match="bad signature"):
        unseal(sign(payload, KEY, disagg.EMBEDDINGS), KEY)


def test_oversized_params_are_refused_before_the_digest():
    with pytest.raises(RequestError, match=f"{MAX_BYTES + 1} bytes; the limit is {MAX_BYTES}"):
        unseal(b"x" * (MAX_BYTES + 1), KEY)


def test_another_version_is_refused_with_both_numbers():
    with pytest.raises(RequestError, match="version 2; this build reads version 1"):
        unseal(seal(msgspec.structs.replace(PARAMS, v=2), KEY), KEY)


@pytest.mark.parametrize(
    "payload", [b"not base64 at all", base64.urlsafe_b64encode(b"{}"), base64.urlsafe_b64encode(b"[")]
)
def test_a_signed_payload_that_is_no_params_is_refused(payload):
    with pytest.raises(RequestError, match="disaggregated_params: "):
        unseal(payload + b"." + disagg._signature(payload, KEY), KEY)


def test_the_prompt_digest_changes_with_prompt_salt_and_lora():
    digests = {
        prompt_digest(b"\1\0\0\0", "", ""),
        prompt_digest(b"\2\0\0\0", "", ""),
        prompt_digest(b"\1\0\0\0", "a", ""),
        prompt_digest(b"\1\0\0\0", "", "a"),
        prompt_digest(b"\1\0\0\0", "ab", "c"),
        prompt_digest(b"\1\0\0\0", "a", "bc"),
    }
    assert len(digests) == 6
