"""A task's own keys in `data.options`: a frozen model a task, and the one line a user gets for a wrong key."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_lab.config import DataConfig
from grpo_lab.config.file import first_problem
from grpo_lab.errors import ConfigError
from grpo_lab.types import Message


class Options(BaseModel):
    """What every task takes: text put behind the question, and a system message."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    instruction: str = ""
    system: str | None = None

    def chat(self, question: str) -> tuple[Message, ...]:
        """The conversation: the system message if any, then the question with the instruction a paragraph below."""
        user = f"{question}\n\n{self.instruction}" if self.instruction else question
        system = [Message(role="system", content=self.system)] if self.system is not None else []
        return (*system, Message(role="user", content=user))


OptionsT = TypeVar("OptionsT", bound=Options)


def read_options(model: type[OptionsT], data: DataConfig) -> OptionsT:
    """`data.options` as `model`. ConfigError for an unknown key (near ones named) or a wrong value."""
    try:
        return model.model_validate(data.options)
    except ValidationError as error:
        raise ConfigError(f"task {data.task!r}: {first_problem(error, model, 'data.options.')}") from None
