"""langchain-openai with use_responses_api: whole, streamed, tools and their result, structured output, kept ones."""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
llm = ChatOpenAI(model=MODEL, max_retries=0, max_tokens=100, temperature=0, use_responses_api=True)
SUM = "What is 12 + 30?"


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=20)
    age: int


def get_weather(city: str) -> str:
    """Weather of a city"""
    return "rain"


answer = llm.invoke(SUM)
assert answer.text == "42" and answer.response_metadata["id"].startswith("resp_"), answer
assert "".join(chunk.text for chunk in llm.stream(SUM)) == "42"
assert llm.invoke("Thanks", previous_response_id=answer.response_metadata["id"]).text
asked = [("human", "What is the weather in Oslo?")]
called = llm.bind_tools([get_weather]).invoke(asked)
(call,) = called.tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"}), call
result = {"role": "tool", "tool_call_id": call["id"], "content": '{"weather": "rain"}'}
assert llm.bind_tools([get_weather]).invoke([*asked, called, result]).text
person = llm.with_structured_output(Person, method="json_schema").invoke("Ada is 30. Answer in JSON.")
assert person.age == 30, person
print("ok")
