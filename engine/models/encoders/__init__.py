"""Encoders, whose tokens attend to later ones: BERT, RoBERTa, XLM-RoBERTa, ModernBERT."""
