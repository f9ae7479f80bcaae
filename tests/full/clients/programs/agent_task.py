"""The task of the agents' programs: three turns of a conversation, in each of which a tool is called."""

from typing import Literal

SYSTEM = "You look up the weather of a city with a tool, and say it in a few words."
QUESTIONS = ("How is the weather in Oslo?", "And in Rome?", "And in Lima?")
City = Literal["Oslo", "Rome", "Lima"]
called: list[str] = []  # the city of each call that a program's library made


def weather(city: City) -> str:
    """Look up the weather of a city.

    Args:
        city: The city.
    """
    assert city in ("Oslo", "Rome", "Lima"), city
    called.append(city)
    return f"In {city} it is sunny, 7 °C."


def check(turns: int, text: object) -> None:
    """Check that tools were called in each turn of a conversation whose last text is `text`; forget the calls."""
    assert len(called) >= turns, called
    assert isinstance(text, str), text
    called.clear()
