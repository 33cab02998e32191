"""One model in every form in which its weights can be stored, and what each makes of a text."""
