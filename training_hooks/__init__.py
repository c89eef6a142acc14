"""The hooks that come with loopscope; importing this package fills the registry."""
