"""Shipped sinks; importing this package registers them."""

from .console import ConsoleSink
from .csv import CSVSink, read_csv
from .jsonl import JSONLSink, read_jsonl
from .tensorboard_sink import TensorBoardSink
from .wandb_sink import WandbSink

__all__ = [
    "CSVSink", "ConsoleSink", "JSONLSink", "TensorBoardSink", "WandbSink", "read_csv", "read_jsonl",
]
