"""Swell and a peer server under the same load in turn: servers, cases, loads, report."""
