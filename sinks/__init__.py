"""Shipped sinks; importing this package registers them."""

from .console import ConsoleSink
from .csv import CSVSink, read_csv
from .jsonl import JSONLSink, read_jsonl
from .mlflow_sink import MLflowSink
from .tensorboard_sink import TensorBoardSink
from .trackio_sink import TrackioSink
from .wandb_sink import WandbSink

__all__ = [
    "CSVSink", "ConsoleSink", "JSONLSink", "MLflowSink", "TensorBoardSink", "TrackioSink", "WandbSink", "read_csv",
    "read_jsonl",
]
