"""Everything that the sweep tries."""

from bench.coverage import library_subjects, torch_subjects, trainer_subjects, transformers_subjects

SUBJECTS = (*transformers_subjects.SUBJECTS, *torch_subjects.SUBJECTS, *library_subjects.SUBJECTS, *trainer_subjects.SUBJECTS)
