"""instructor: a typed answer by schema, by JSON mode and by a tool, and a stream of parts."""

import os

import instructor
import openai
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": "Ada is 30. Answer in JSON."}]


class Person(BaseModel):
    """A person"""

    name: str = Field(max_length=20)
    age: int


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
    person = client.chat.completions.create(
        model=os.environ["MODEL"], messages=ASK, response_model=Person, max_retries=0, max_tokens=100
    )
    assert isinstance(person.age, int), person
client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.JSON_SCHEMA)
parts = list(client.chat.completions.create_partial(model=os.environ["MODEL"], messages=ASK, response_model=Person))
assert parts[-1].age == 30, parts
print("ok")
