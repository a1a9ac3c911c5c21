"""Texts, chats and prompts from files, folders, stdin and datasets."""
