"""Compares what describe_api.py says of a package with the contract file: a line for each difference."""

from __future__ import annotations

from typing import Any

NAMES_SINCE_1_3 = ("conversation_params", "priority")
METHODS = ("generate_async", "get_stats_async", "get_kv_cache_events_async", "shutdown")
METHODS_SINCE_1_3 = ("get_kv_cache_capacity", "_check_health")
METHODS_SINCE_1_4 = ("get_memory_status", "release", "resume")


def drift(described: dict[str, Any], contract: dict[str, Any], used: dict[str, list[str]]) -> list[str]:
    """Return the differences; the profile is that of the description's version."""
    is_1_3 = not described["version"].startswith("1.2")
    lines = [
        f"{module}.{name}: missing"
        for module, names in used.items()
        for name in names
        if name not in described["names"][module]
    ]
    methods = [*METHODS, *(METHODS_SINCE_1_3 if is_1_3 else ())]
    if is_1_3 and not described["version"].startswith("1.3"):
        methods += METHODS_SINCE_1_4
    lines += [f"LLM.{name}: missing" for name in methods if name not in described["methods"]]
    lines += _compare("LLM()", _constructor(contract), described["constructor"])
    lines += _compare("LLM.generate_async", _generate_async(contract, is_1_3), described["generate_async"])
    sampling = {name: _default(entry) for name, entry in contract["sampling_params"]["fields"].items()}
    lines += _compare("SamplingParams", sampling, described["sampling_params"], may_have_more=is_1_3)
    table = contract["disaggregated_params"]
    names = [*table["v1_2_1"], *(table["added_1_3"] if is_1_3 else ())]
    lines += _compare("DisaggregatedParams", dict.fromkeys(names, "None"), described["disaggregated_params"])
    lines += _names("LlmArgs", _llm_args(contract, is_1_3), described["llm_args"])
    return lines + _more(contract, described)


def _more(contract: dict[str, Any], described: dict[str, Any]) -> list[str]:
    guides = list(contract["guided_decoding_params"])
    ranks = list(contract["scheduling_params"])
    output = list(contract["result_objects"]["CompletionOutput"]["fields"])
    lines = _names("GuidedDecodingParams", guides, described["guided_decoding_params"])
    lines += _names("SchedulingParams", ranks, described["scheduling_params"])
    lines += _names("CompletionOutput", output, described["completion_output"])
    if described["request_error_base"] != contract["errors"]["RequestError"]["base"]:
        lines.append(f"RequestError: a {described['request_error_base']}")
    if not {"log_request_metrics_dict", "log_metrics_dict"} & set(described["collector"]):
        lines.append("MetricsCollector: neither log_request_metrics_dict nor log_metrics_dict")
    return lines


def _compare(where: str, expected: dict[str, str], found: dict[str, str], *, may_have_more: bool = False) -> list[str]:
    lines = [f"{where}.{name}: missing" for name in expected if name not in found]
    if not may_have_more:
        lines += [f"{where}.{name}: new" for name in found if name not in expected]
    lines += [
        f"{where}.{name}: default {found[name]}, the contract says {default}"
        for name, default in expected.items()
        if name in found and found[name] not in (default, "factory")
    ]
    return lines


def _names(where: str, expected: list[str], found: Any) -> list[str]:
    return [f"{where}.{name}: missing" for name in expected if name not in found]


def _constructor(contract: dict[str, Any]) -> dict[str, str]:
    entries = contract["llm"]["explicit_ctor_args"]
    return {
        name: "required" if entry.get("required") else repr(entry["default"])
        for name, entry in entries.items()
        if name != "**kwargs"
    }


def _generate_async(contract: dict[str, Any], is_1_3: bool) -> dict[str, str]:
    expected = {}
    for name, text in contract["llm"]["methods"]["generate_async"]["params"].items():
        if name in NAMES_SINCE_1_3 and not is_1_3:
            continue
        default = text.split("=")[1].split()[0] if "=" in text else "required"
        expected[name] = {"DEFAULT_REQUEST_PRIORITY": "0.5"}.get(default, default)
    return expected


def _default(entry: list[Any]) -> str:
    value = entry[1]
    return "None" if isinstance(value, str) and value.startswith("null") else repr(value)


def _llm_args(contract: dict[str, Any], is_1_3: bool) -> list[str]:
    """Return the settings that a release has; tools/describe_trtllm.py looks into their blocks."""
    release = "1.3" if is_1_3 else "1.2"
    found = []
    for name, (_, _, *rest) in contract["config_classes"]["LlmArgs"].items():
        more = rest[0] if rest else {}
        if more.get("since", "") <= release < more.get("until", "9") and not more.get("deprecated"):
            found.append(name)
    return found
