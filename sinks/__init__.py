"""The destinations of metrics that come with loopscope; importing this package fills the registry."""

from sinks.console import ConsoleSink
from sinks.csv import CSVSink, read_csv
from sinks.jsonl import JSONLSink, read_jsonl
from sinks.record import Record
from sinks.tensorboard_sink import TensorBoardSink
from sinks.wandb_sink import WandbSink

__all__ = [
    "CSVSink",
    "ConsoleSink",
    "JSONLSink",
    "Record",
    "TensorBoardSink",
    "WandbSink",
    "read_csv",
    "read_jsonl",
]
