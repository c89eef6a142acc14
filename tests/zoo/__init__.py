"""A zoo of trainings with planted faults, and of healthy ones, that measures the diagnoses of the doctor."""
