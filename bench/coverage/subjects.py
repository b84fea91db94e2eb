"""Everything that the sweep tries."""

from bench.coverage import torch_subjects, transformers_subjects

SUBJECTS = (*transformers_subjects.SUBJECTS, *torch_subjects.SUBJECTS)
