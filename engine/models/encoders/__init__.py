"""Bidirectional encoders: BERT, RoBERTa, XLM-RoBERTa, ModernBERT."""
