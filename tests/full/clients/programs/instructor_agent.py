"""instructor: three turns that each become a call, one of them after two calls that a validator refuses."""

import sys

import instructor
import openai
from agent_task import QUESTIONS, SYSTEM, City, check, weather
from pydantic import BaseModel, Field, field_validator

BASE, MODEL, _ = sys.argv[1:]


class Weather(BaseModel):
    """Look up the weather of a city."""

    city: City = Field(description="The city.")

    @field_validator("city")
    @classmethod
    def _twice_refused(cls, city: str) -> str:
        refusals.append(city)
        if len(refusals) in (2, 3):
            raise ValueError("the name of the city is to be confirmed")
        return city


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    refusals: list[str] = []
    client = instructor.from_openai(openai.OpenAI(base_url=f"{BASE}/v1", api_key="-", max_retries=0), mode=mode)
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        found, completion = client.chat.completions.create_with_completion(
            model=MODEL, messages=messages, response_model=Weather, temperature=0, max_retries=3, max_tokens=200
        )
        # the whole message as the library returned it, with null fields
        message = completion.choices[0].message.model_dump()
        messages.append(message)
        for call in message["tool_calls"] or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": weather(found.city)})
        if not message["tool_calls"]:
            messages.append({"role": "user", "content": weather(found.city)})
    assert len(refusals) == 5, refusals
    check(len(QUESTIONS), found.city)
print("three turns, with calls that a validator refuses: Mode.TOOLS and Mode.JSON_SCHEMA")
