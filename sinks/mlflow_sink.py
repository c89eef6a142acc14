"""MLflow sink."""

from typing import ClassVar

from loopscope.errors import UsageError
from loopscope.hooks import SinkRegistry

from . import mlflow_process
from .client_sink import ClientSink

LONGEST_NAME = 500


@SinkRegistry.register
class MLflowSink(ClientSink):
    """Send every metric to an MLflow experiment, and write STRATEGY.jsonl.

    The sink works like :class:`WandbSink`: a separate process reads the record and sends it, so that a client that
    fails costs the run less than a second. A resumed run continues its MLflow run. MLflow's variables are respected:
    MLFLOW_TRACKING_URI gives the server or the local store.

    Args:
        experiment: the MLflow experiment; by default that of MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, or else
            the name of loopscope's experiment.
    """

    name: ClassVar[str] = "mlflow"
    flag: ClassVar[str | None] = "--hook-mlflow"
    option: ClassVar[str | None] = "experiment"
    title: ClassVar[str] = "MLflow"
    package: ClassVar[str] = "mlflow"
    program: ClassVar[str] = mlflow_process.__file__

    def __init__(self, *, experiment: str | None = None) -> None:
        super().__init__(experiment)

    @classmethod
    def check_project(cls, project: str) -> None:
        """Raise :class:`UsageError` for a name that MLflow does not accept."""
        if not project.strip() or len(project) > LONGEST_NAME:
            raise UsageError(f"{project!r} is not a valid MLflow experiment: use 1 to {LONGEST_NAME} characters.")
