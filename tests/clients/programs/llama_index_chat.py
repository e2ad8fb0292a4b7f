"""llama-index: a chat whole, streamed and async, tools, structured output, an agent."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

ASK = [ChatMessage(role="user", content="What is 12 + 30?")]


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=20)
    age: int


def get_weather(city: str) -> str:
    """Weather of a city"""
    return "rain"


tool = FunctionTool.from_defaults(get_weather, description="Weather of a city")
llm = OpenAILike(
    model=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key="none", is_chat_model=True,
    is_function_calling_model=True, should_use_structured_outputs=True, temperature=0, max_tokens=100, max_retries=0,
)  # fmt: skip
assert llm.chat(ASK).message.content == "42"
assert "".join(part.delta or "" for part in llm.stream_chat(ASK)) == "42"
assert llm.complete("What is 12 + 30?").text == "42"
(call,) = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], "What is the weather in Oslo?"))
assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Oslo"}), call
*_, last = llm.stream_chat_with_tools([tool], "What is the weather in Oslo?")
(call,) = llm.get_tool_calls_from_response(last)
assert call.tool_kwargs == {"city": "Oslo"}, call
person = llm.as_structured_llm(Person).complete("Ada is 30. Answer in JSON.").raw
assert person.age == 30, person


async def ask():
    assert (await llm.achat(ASK)).message.content == "42"
    agent = FunctionAgent(tools=[tool], llm=llm, streaming=False)
    return await agent.run("What is the weather in Oslo?")


answer = asyncio.run(ask())
assert [made.tool_name for made in answer.tool_calls] == ["get_weather"] and answer.response.content, answer
print("ok")
