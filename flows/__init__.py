"""One Prefect flow a file. A flow reads like the paragraph that describes it; the work is in tasks."""
