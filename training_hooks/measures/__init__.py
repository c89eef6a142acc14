"""The mathematics that several hooks share, or that is too long to stand in a hook's file: functions of tensors."""
