"""The folder that ``loopscope watch`` puts at the front of ``PYTHONPATH``."""
