"""What blocks of settings are written in: their base, ranges, and rules beside keys that not every engine honors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
SeqLen = Annotated[int, msgspec.Meta(ge=2)]  # a prompt of one token, and one that is generated
Duration = Annotated[float, msgspec.Meta(ge=0)]  # its unit is in the field's name
PositiveDuration = Annotated[float, msgspec.Meta(gt=0)]
Instances = Annotated[int, msgspec.Meta(ge=1, le=64)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings block."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What an engine does with a key of its YAML."""

    kind: Literal["honored", "harmless", "refused"]
    reason: str = ""  # of a refusal, with the remedy
    accepted: tuple[Any, ...] = ()  # values that a refused key may have all the same


class Engines:
    """Stands beside a key, or a block of keys, that not every engine honors; an engine it does not name does."""

    def __init__(self, **rules: Rule) -> None:
        self.rules = rules


HARMLESS = Rule("harmless")
# Whether NIXL moves KV through page-locked host memory: auto, where UCX can't move a GPU's without the host.
StagingChoice = Literal["auto", "always", "never"]
_TRTLLM_STAGES = Rule("refused", "TensorRT-LLM stages KV itself; remove it", ("auto",))
Staging = Annotated[StagingChoice, Engines(trtllm=_TRTLLM_STAGES)]


NO_QUANT = "NO_QUANT"
_FEW_BITS = Rule(
    "refused",
    "8-bit floats and 4-bit integers are kept here; set FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_BLOCK_SCALES, W4A16_AWQ,"
    " W4A16_GPTQ or NO_QUANT, or remove it",
    ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES", "W4A16_AWQ", "W4A16_GPTQ", NO_QUANT),
)


class QuantConfig(Settings, frozen=True, kw_only=True):
    """How weights are stored, by TensorRT-LLM's names."""

    # The layers' projections are rounded to 8-bit floats when they are loaded: with one scale for each (FP8), for each
    # of its output channels, or for a block of 128 x 128. W4A16_AWQ and W4A16_GPTQ say what a quantized checkpoint is,
    # or what load_format dummy makes. NO_QUANT: a quantized checkpoint is dequantized to the engine's `dtype`. None:
    # weights stay as the checkpoint has them where there are products with them, whatever the `dtype`
    quant_algo: Annotated[str | None, Engines(torch=_FEW_BITS, mocker=HARMLESS)] = None
    # Modules whose projections stay plain where quant_algo has a plain checkpoint's rounded: names with * for anything
    exclude_modules: Annotated[tuple[str, ...], Engines(mocker=HARMLESS)] = ()


NGRAM = "NGram"
SYNTHETIC = "Synthetic"  # of a machine without weights: which drafts are right is drawn
DRAFT_MODELS = ("DraftTarget", "Draft_Target")  # TensorRT-LLM's names, of 1.2 and of 1.3
EAGLE = ("Eagle", "Eagle3")  # the same of a head
_OTHER_DRAFTS = (
    "drafts come of NGram, Draft_Target or Eagle3 here; set one of these, remove speculative_config, or use"
    " engine: trtllm"
)
_DRAFTS = ("", NGRAM, *DRAFT_MODELS, *EAGLE, SYNTHETIC)
DRAFT_KINDS = Engines(torch=Rule("refused", _OTHER_DRAFTS, _DRAFTS), mocker=HARMLESS)
_TREE = Engines(torch=Rule("refused", "drafts are one chain here, no tree; remove it", (None, False)), mocker=HARMLESS)
_EXACT = Rule("refused", "a draft is accepted where it is what the model draws; remove it")
_POOL = Rule("refused", "drafts come of a request's own tokens, never of another's; set false, or remove it", (False,))
_NOT_TRTLLM = Rule("refused", "Synthetic drafts are engine torch's; remove it")
_BY_COST = Engines(torch=HARMLESS, mocker=HARMLESS)  # torch turns drafts off by what steps take


class SpeculativeConfig(Settings, frozen=True, kw_only=True):
    """Several tokens a step, by TensorRT-LLM's names; keys of kinds that it alone has are in its YAML, not here."""

    decoding_type: Annotated[str, DRAFT_KINDS] = ""  # "": no drafts
    max_draft_len: Annotated[Positive | None, Engines(mocker=HARMLESS)] = None  # tokens of a draft at the most
    # NGram: so many tokens at the end must stand elsewhere too, at the most. None, 0: the engine's
    max_matching_ngram_size: Annotated[NotNegative | None, Engines(mocker=HARMLESS)] = None
    is_keep_all: Annotated[bool, Engines(mocker=HARMLESS)] = True  # NGram: of several places false leaves the last
    is_use_oldest: Annotated[bool, Engines(mocker=HARMLESS)] = True  # NGram: the first of several places, or the last
    is_public_pool: Annotated[bool | None, Engines(torch=_POOL, mocker=HARMLESS)] = None
    max_concurrency: Annotated[NotNegative | None, Engines(mocker=HARMLESS)] = None  # more sequences: no drafts
    # Synthetic: the share of tokens, verified behind right ones, that counts as right
    acceptance_rate: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1)] | None, Engines(trtllm=_NOT_TRTLLM, mocker=HARMLESS)
    ] = None
    # max_draft_len from so many sequences of a step on
    draft_len_schedule: Annotated[dict[int, NotNegative] | None, Engines(mocker=HARMLESS)] = None
    acceptance_window: Annotated[int | None, _BY_COST] = None
    acceptance_length_threshold: Annotated[float | None, _BY_COST] = None
    eagle_choices: Annotated[Any, _TREE] = None
    use_dynamic_tree: Annotated[bool | None, _TREE] = None
    num_eagle_layers: Annotated[int | None, _TREE] = None
    posterior_threshold: Annotated[float | None, Engines(torch=_EXACT, mocker=HARMLESS)] = None
    # Eagle3: of TensorRT-LLM's two ways to run the head; here there is one
    eagle3_one_model: Annotated[bool | None, _BY_COST] = None
    # Draft_Target: the draft model's folder or hub id. Eagle3: the head's folder
    speculative_model: Annotated[str | None, Engines(mocker=HARMLESS)] = None


class DiscoveryConfig(Settings, frozen=True, kw_only=True):
    """How servers of one model find each other's workers; serve.py --discovery sets it for a launch."""

    # static: a server knows the recipe's workers, which are its own; the others hold what all servers share
    backend: Literal["static", "directory", "etcd", "kubernetes"] = "static"
    folder: str = ""  # directory: on one host or a shared file system, of one user, with nothing else in it
    endpoints: tuple[str, ...] = ()  # etcd: http://host:2379 or https://...; one after the other until one answers
    prefix: str = "bireme"  # etcd: of all keys
    ca_cert: str = ""  # etcd over https: file; "": the system's authorities
    cert: str = ""  # etcd over https: the client's certificate, with cert_key
    cert_key: str = ""
    service: str = ""  # kubernetes: of the pods with workers, NAME or NAME.NAMESPACE; without: the own pod's namespace
    # kubernetes: folder of the pod's token, ca.crt and namespace
    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    lease_s: Annotated[float, msgspec.Meta(ge=2, le=3600)] = 10.0  # a worker that was silent for so long is gone

    @property
    def is_shared(self) -> bool:
        return self.backend != "static"
