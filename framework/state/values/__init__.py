"""Python objects and containers: which values they contain, how these are read and written, and their names."""

from .containers import CONTAINERS, MUTABLE_CONTAINERS, STORED_DICTS, dict_like, keys_of, refill, values_of
from .contents import batch_contents, contents_of, has_contents
from .objects import (
    ABSENT, ATOMS, IMMUTABLE, LIBRARIES, REFERRING, Slots, Transient, attributes_of, instance_attributes,
    is_array_of_objects, is_code, is_frozen, is_of_library, is_opaque, native_of, read_native, referenced_objects,
    write_attributes, write_native,
)
from .short_names import described_tensor, short_name

__all__ = [
    "ABSENT", "ATOMS", "CONTAINERS", "IMMUTABLE", "LIBRARIES", "MUTABLE_CONTAINERS", "REFERRING", "STORED_DICTS",
    "Slots", "Transient", "attributes_of", "batch_contents", "contents_of", "described_tensor", "dict_like",
    "has_contents", "instance_attributes", "is_array_of_objects", "is_code", "is_frozen", "is_of_library",
    "is_opaque", "keys_of", "native_of", "read_native", "referenced_objects", "refill", "short_name",
    "values_of", "write_attributes", "write_native",
]
