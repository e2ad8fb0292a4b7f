"""langchain-openai: a chat whole, streamed and in a batch, tools, structured output, the completion model."""

import os

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
llm = ChatOpenAI(model=MODEL, max_retries=0, max_tokens=100, temperature=0)


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=20)
    age: int


def get_weather(city: str) -> str:
    """Weather of a city"""
    return "rain"


assert llm.invoke("What is 12 + 30?").content == "42"
assert "".join(chunk.content for chunk in llm.stream("What is 12 + 30?")) == "42"
assert [message.content for message in llm.batch(["What is 12 + 30?", "What is 20 + 30?"])] == ["42", "50"]
call = llm.bind_tools([get_weather]).invoke("What is the weather in Oslo?").tool_calls[0]
assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"}), call
person = llm.with_structured_output(Person, method="json_schema").invoke("Ada is 30. Answer in JSON.")
assert person.age == 30, person
assert OpenAI(model=MODEL, max_tokens=5).invoke("One day")
print("ok")
