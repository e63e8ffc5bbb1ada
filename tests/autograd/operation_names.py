# tests/autograd/operation_names.py: operation_names.py ROOT HEADER...: the names of the functions that the headers declare,
# as C strings. A function of options, kn_elu_, has the name of its macro.
import re
import sys

root, *headers = sys.argv[1:]
for header in headers:
    with open(f"{root}/{header}") as f:
        text = re.sub(r"/\*.*?\*/", "", f.read(), flags=re.S)
    for name in re.findall(r"^KN_API\b[^;(]*?(kn_\w+)\s*\(", text, flags=re.M):
        print(f'"{name.rstrip("_")}",')
