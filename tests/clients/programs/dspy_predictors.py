"""dspy: its LM whole and async, typed predictions by schema (what a model of this size says in them means nothing)."""

import asyncio
import os
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]
ASK = "What is 12 + 30?"
Mood = Literal["calm", "glad", "sad"]
# dspy sends a schema to models alone that it knows, or that a provider is registered for
access = AccessPolicy(provider="bireme", env_keys=("OPENAI_API_KEY",), base_url=URL)
register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm")), supports=ModelSupport(response_schema=True)
)


class Judge(dspy.Signature):
    """Judge a sentence."""

    sentence: str = dspy.InputField()
    mood: Mood = dspy.OutputField()
    is_short: bool = dspy.OutputField()


for name in (f"openai/{MODEL}", f"bireme/{MODEL}"):
    lm = dspy.LM(name, api_base=URL, api_key="none", temperature=0, max_tokens=200, cache=False, num_retries=0)
    assert lm(ASK) == ["42"] and lm(messages=[{"role": "user", "content": ASK}]) == ["42"]
    assert asyncio.run(lm.acall(ASK)) == ["42"]
told = dspy.LM(f"openai/{MODEL}", model_type="responses", api_base=URL, api_key="none", cache=False, num_retries=0)(ASK)
assert str(told[0]["text"] if isinstance(told[0], dict) else told[0]) == "42", told
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
judged = dspy.Predict(Judge)(sentence="The sun is out.")
assert judged.mood in Mood.__args__ and isinstance(judged.is_short, bool), judged
thought = dspy.ChainOfThought(Judge, rationale_field_type=Literal["It says so.", "It does not say so."])
judged = thought(sentence="The sun is out.")
assert judged.reasoning.startswith("It ") and judged.mood in Mood.__args__, judged
try:
    dspy.LM("bireme/nobody", api_base=URL, api_key="none", num_retries=0)(ASK)
except Exception as error:
    assert "does not exist; GET /v1/models" in str(error), error
else:
    raise AssertionError("a model that is not there has answered")
print("ok")
