"""Schemas that Pydantic writes: titles, defaults, definitions, nullable fields as unions."""

from __future__ import annotations

import json
from datetime import date, datetime
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from .case import Case


class Stop(BaseModel):
    """A place on the way."""

    city: str
    nights: int = Field(ge=0, le=30)
    hotel: str | None = None


class TravelPlan(BaseModel):
    """A trip, as travel assistants ask for it."""

    title: str = Field(description="A short name", max_length=60)
    leaves: date
    returns: date | None = None
    stops: list[Stop] = Field(min_length=1, max_length=4)
    transport: Literal["train", "plane", "bus", "car"] = "train"
    budget: float = Field(gt=0, lt=1e6)


class Severity(StrEnum):
    LOW = "low"
    HIGH = "high"
    CRITICAL = "critical"


class Tier(IntEnum):
    FREE = 0
    PRO = 1
    TEAM = 2


class SupportTicket(BaseModel):
    """A help desk's triage of a message."""

    model_config = ConfigDict(extra="forbid")

    ticket_id: UUID
    opened: datetime
    severity: Severity
    tier: Tier = Tier.FREE
    summary: str = Field(description="One sentence")
    tags: list[str] = Field(default_factory=list, max_length=5)
    follow_up: bool = False


class Section(BaseModel):
    """An outline of a report, as writing agents plan it: sections within sections."""

    heading: str = Field(min_length=1)
    words: int = Field(default=200, ge=50, le=2000, multiple_of=50)
    sections: list[Section] = Field(default_factory=list)


class Deposit(BaseModel):
    kind: Literal["deposit"]
    amount: int = Field(gt=0, le=100_000)


class Transfer(BaseModel):
    kind: Literal["transfer"]
    amount: int = Field(gt=0, le=100_000)
    to: str = Field(pattern=r"^ACC-\d{6}$")


class Closure(BaseModel):
    kind: Literal["closure"]
    reason: str | None


class BankOrder(BaseModel):
    """What a banking assistant hands on: an order that is one of three."""

    order: Annotated[Deposit | Transfer | Closure, Field(discriminator="kind")]
    confirmed: bool


class Person(BaseModel):
    """A person, with the field names of a Japanese form."""

    name: str = Field(alias="名前")
    age: int = Field(alias="年齢", ge=0, le=130)
    blood: Literal["A", "B", "AB", "O", "不明"] = Field(alias="血液型")


class ServerSettings(BaseModel):
    """Settings of a server: maps, tuples, nested defaults."""

    limits: dict[Annotated[str, Field(pattern=r"^[a-z_]{1,12}$")], int] = Field(min_length=1, max_length=3)
    window: tuple[int, int]
    origin: tuple[str, Literal["http", "https"], Annotated[int, Field(ge=1, le=65535)]]
    retry: int | float | None = None
    nested: Stop = Stop(city="Rome", nights=1)


def _case(name: str, prompt: str, model: type[BaseModel]) -> Case:
    schema: dict[str, Any] = model.model_json_schema()
    return Case(name, prompt, json.dumps(schema, ensure_ascii=False), model)


PYDANTIC = [
    _case("travel_plan", "Plan a week by train from Vienna to Rome with a stop in Florence in May 2025.", TravelPlan),
    _case("support_ticket", "Customer: since this morning nobody in our team can log in!", SupportTicket),
    _case("report_outline", "Outline a report on urban bees.", Section),
    _case("bank_order", "Please move 250 to account ACC-004711.", BankOrder),
    _case("person_japanese", "山田太郎さん、34歳、血液型はO型です。", Person),
    _case("server_settings", "Allow 100 requests per minute, from https only.", ServerSettings),
]
