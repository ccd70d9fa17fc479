"""Folders mirror the packages; test_tidy, test_contract and test_docs see the whole tree."""
