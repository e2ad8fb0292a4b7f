"""The next requests a second, from those of the intervals before.

`arima` and `kalman` are statsmodels', which is imported when one is made (the extra `planner`).
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections import deque
from typing import Any, Literal, Protocol, get_args

import numpy as np

from bireme.errors import ConfigError

PredictorName = Literal["constant", "arima", "kalman"]
_WINDOW = 60  # intervals that are looked at
_FEW = 8  # below that the last value is the prediction
_FIT_EVERY = 10  # intervals: between, the parameters stay
_MOST_TIMES = 2.0  # the most that was seen: a fit can run away


class Predictor(Protocol):
    def observe(self, value: float) -> None: ...

    def predict(self, steps: int = 1) -> float:
        """Return the most that is expected in so many intervals; 0 before anything was observed."""
        ...


class ConstantPredictor:
    """The next is as the last."""

    def __init__(self) -> None:
        self._last = 0.0

    def observe(self, value: float) -> None:
        self._last = value

    def predict(self, steps: int = 1) -> float:
        return self._last


class StatePredictor:
    """A state-space model of statsmodels over the last intervals: ARIMA (1, 1, 1), or Kalman's filter on a trend."""

    def __init__(self, name: PredictorName) -> None:
        self._name = name
        self._model = _model_of(name)
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._parameters: Any = None
        self._until_fit = 0

    def observe(self, value: float) -> None:
        self._values.append(value)
        self._until_fit -= 1

    def predict(self, steps: int = 1) -> float:
        values = np.array(self._values, float)
        if len(values) < _FEW or np.ptp(values) == 0:  # nothing that could be fitted
            return float(values[-1]) if len(values) else 0.0
        expected = self._forecast(values, steps)
        if not math.isfinite(expected):
            return float(values[-1])
        return min(max(expected, 0.0), _MOST_TIMES * float(values.max()))

    def _forecast(self, values: Any, steps: int) -> float:
        model = self._model(values)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a fit that does not converge is a poor guess, and bounded
                if self._parameters is None or self._until_fit <= 0:
                    self._parameters, self._until_fit = model.fit(disp=False, maxiter=50).params, _FIT_EVERY
                return float(np.max(model.filter(self._parameters).forecast(steps)))
        except (np.linalg.LinAlgError, ValueError):
            return math.nan


def make_predictor(name: str) -> Predictor:
    """Raises ConfigError for one that is unknown, or whose library is missing."""
    if name not in get_args(PredictorName):
        raise ConfigError(f"planner.predictor: {name!r}; one of {', '.join(get_args(PredictorName))}")
    return ConstantPredictor() if name == "constant" else StatePredictor(name)  # type: ignore[arg-type]


def _model_of(name: PredictorName) -> Any:
    try:
        if name == "arima":
            sarimax = importlib.import_module("statsmodels.tsa.statespace.sarimax").SARIMAX
            return lambda values: sarimax(
                values, order=(1, 1, 1), enforce_stationarity=False, enforce_invertibility=False
            )
        components = importlib.import_module("statsmodels.tsa.statespace.structural").UnobservedComponents
        return lambda values: components(values, "local linear trend")
    except ImportError as error:
        raise ConfigError(
            f"planner.predictor: {name} needs statsmodels ({error}): pip install 'bireme[planner]', or take constant"
        ) from error
