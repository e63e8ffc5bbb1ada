"""bench/peers/knap.py: libknap from Python by ctypes. Functions, options and enums are read from the headers."""
import ctypes
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
sys.path.insert(0, os.path.join(ROOT, 'tests', 'lint'))
from files import code_without_comments, public_headers

import torch

ZERO = -(1 << 62)    # KN_ZERO
STRUCTS = {'kn_scope', 'kn_values', 'kn_initializer', 'kn_optim_group', 'kn_schedule', 'kn_scaler_state'}
DTYPES = {torch.float32: 'KN_F32', torch.float64: 'KN_F64', torch.bfloat16: 'KN_BF16', torch.float16: 'KN_F16',
          torch.int64: 'KN_I64', torch.int32: 'KN_I32', torch.uint8: 'KN_U8', torch.bool: 'KN_BOOL'}
PLAIN = {'double': ctypes.c_double, 'int64_t': ctypes.c_int64, 'uint64_t': ctypes.c_uint64, 'bool': ctypes.c_bool,
         'size_t': ctypes.c_size_t, 'int': ctypes.c_int, 'uint32_t': ctypes.c_uint32, 'void': None}


class Failed(Exception):
    """A call of Knap failed; the message is kn_error's."""


class Tensor:
    """A kn_tensor of the open scope."""

    def __init__(self, handle):
        self.handle = handle


class Knap:
    """The functions of libknap: k.relu(x), k.elu(x, alpha=0.5); a list stands for an array."""

    def __init__(self, build):
        self._library = ctypes.CDLL(os.path.abspath(os.path.join(build, 'libknap.so')))
        self.enums, self._structs, self._functions = {}, {}, {}
        headers = '\n'.join(code_without_comments(h) for h in public_headers())
        fields = {name: body.replace('\\\n', ' ')
                  for name, body in re.findall(r'#define (\w+_OPTIONS)[ \t]+((?:[^\n]*\\\n)*[^\n]*)', headers)}
        source = re.sub(r'(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', '', headers)
        for _ in range(2):    # one may begin with another
            source = re.sub(r'\b\w+_OPTIONS;', lambda m: fields[m[0][:-1]] + ';', source)
        for body in re.findall(r'typedef enum \w+ \{(.*?)\}', source, re.S):
            value = -1
            for word in filter(None, (w.strip() for w in body.split(','))):
                name, _, given = (p.strip() for p in word.partition('='))
                base, _, more = given.partition('+')
                value = value + 1 if not given else self.enums.get(base.strip(), 0) + int(more) if more else int(given, 0)
                self.enums[name] = value
        self._pointers = set(re.findall(r'typedef [^;{]*\(\*(kn_\w+)\)\(', source))    # to functions
        sizes = dict(re.findall(r'(?m)^#define (KN_MAX_\w+)\s+(\d+)$', '\n'.join(
            code_without_comments(h) for h in public_headers())))
        bodies = dict(re.findall(r'typedef struct (kn_\w+) \{([^{}]*)\} \1;', source))
        for name in sorted(bodies, key=lambda n: n.endswith('_options')):    # those hold others
            body = re.sub(r'\bKN_MAX_\w+', lambda m: sizes.get(m[0], m[0]), bodies[name])
            if name in STRUCTS or name.endswith(('_options', '_scaling')):
                self._structs[name] = type(name, (ctypes.Structure,), {'_fields_': list(self._fields(body))})
        self._optimizers, self._scalers, self._modules, self._parts = [], [], [], []
        for result, name, inside in re.findall(r'KN_API\s+([\w\s]+?[\s*]+)(kn_\w+)\(([^;]*)\)[^;()]*;', source):
            self._functions[name] = result, inside

    def _fields(self, body):
        for declaration in filter(None, (d.strip() for d in body.split(';'))):
            kind, names = re.match(r'((?:struct\s+|const\s+)?\w+)\s*(.*)', declaration, re.S).groups()
            if '(*' in names:    # a pointer to a function
                yield re.search(r'\(\*(\w+)\)', names)[1], ctypes.c_void_p
                continue
            for name in (n.strip() for n in names.split(',')):
                plain, count = re.match(r'\W*(\w+)(?:\[(\d+)\])?', name).groups()
                field = ctypes.c_void_p if '*' in name else self._type(kind)
                yield plain, field * int(count) if count else field

    def _type(self, text):
        if 'char *' in text:
            return ctypes.c_char_p
        if '*' in text or '[' in text or '(' in text:
            return ctypes.c_void_p
        word = text.replace('const ', '').split()[0]
        if word in self._pointers:
            return ctypes.c_void_p
        return PLAIN[word] if word in PLAIN else self._structs.get(word, ctypes.c_int)

    def __getattr__(self, name):
        symbol = f'kn_{name}' if f'kn_{name}' in self._functions else f'kn_{name}_'
        if symbol not in self._functions:
            raise AttributeError(f'the headers have no {symbol}')
        result, inside = self._functions[symbol]
        function = getattr(self._library, symbol)
        kinds = [] if inside.strip() == 'void' else [self._type(a.strip()) for a in inside.split(',')]
        function.argtypes, function.restype = kinds, self._type(result.strip())
        gives_tensor = re.fullmatch(r'kn_tensor \*', result.strip()) is not None

        def call(*arguments, **options):
            plain = [convert(a) for a in arguments]
            if kinds and isinstance(kinds[-1], type) and issubclass(kinds[-1], ctypes.Structure) and len(plain) < len(kinds):
                given = {n: convert(v) for n, v in options.items()}
                if given.keys() - dict(kinds[-1]._fields_):
                    raise Failed(f'{symbol} has no option {", ".join(given.keys() - dict(kinds[-1]._fields_))}')
                pointers = {n: v if not isinstance(v, ctypes.Array) or issubclass(dict(kinds[-1]._fields_)[n], ctypes.Array)
                            else ctypes.cast(v, ctypes.c_void_p) for n, v in given.items()}
                plain.append(kinds[-1](_size=ctypes.sizeof(kinds[-1]), **pointers))
            value = function(*plain)
            if not self.ok_():
                message = self._library.kn_error().decode()
                self._library.kn_clear_error()
                raise Failed(f'{symbol}: {message}')
            return Tensor(value) if gives_tensor and value else value
        self.__dict__[name] = call
        return call

    def struct(self, name, **fields):
        """A struct of the headers, for an option."""
        return self._structs[name](**fields)

    def ok_(self):
        self._library.kn_ok.restype, self._library.kn_error.restype = ctypes.c_bool, ctypes.c_char_p
        return self._library.kn_ok()

    def dtype(self, dtype):
        return self.enums[DTYPES[dtype]]

    def tensor(self, values):
        """A Knap tensor with the elements of a torch tensor, row-major."""
        values = values.detach().contiguous()
        return getattr(self, 'from')(self.dtype(values.dtype), self.enums['KN_CPU'], ctypes.c_void_p(values.data_ptr() or None),
                                     values.dim(), list(values.shape))

    def struct(self, name, **fields):
        return self._structs[name](**{n: convert(v) for n, v in fields.items()})

    def module(self):
        """Memory for a module of any type, until free_modules."""
        self._modules.append(ctypes.create_string_buffer(1 << 14))
        return self._modules[-1]

    def part(self):
        """Memory for a module that another one will hold."""
        self._parts.append(ctypes.create_string_buffer(1 << 14))
        return self._parts[-1]

    def optimizer(self, maker, module, **options):
        self._optimizers.append(getattr(self, maker)(module, **options))
        return self._optimizers[-1]

    def scaler(self, module, **options):
        self._scalers.append(self.scaler_new(module, **options))
        return self._scalers[-1]

    def free_modules(self):
        """Of the case, with their optimizers."""
        for o in self._optimizers:
            self.optim_free(o)
        for s in self._scalers:
            self.scaler_free(s)
        for m in self._modules:
            self.module_free(m)
        for kept in (self._optimizers, self._scalers, self._modules, self._parts):
            kept.clear()

    def address(self, name):
        """Of a function."""
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p)

    def slots(self, n):
        """Room for n tensors that a call gives beside its result; filled() has them."""
        return (ctypes.c_void_p * n)()

    def filled(self, slots):
        return [Tensor(handle) for handle in slots]

    def values(self, t):
        """A torch tensor with the elements of a Knap tensor."""
        code = self.dtype_of(t)
        dtype = next(d for d, n in DTYPES.items() if self.enums[n] == code)
        out = torch.empty([self.size(t, i) for i in range(self.ndim(t))], dtype=dtype)
        self.to_host(t, ctypes.c_void_p(out.data_ptr() or None), out.numel() * out.element_size())
        return out


def convert(value):
    """A Python value as a C argument: a list is an array of numbers or of tensors."""
    if isinstance(value, Tensor):
        return value.handle
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (list, tuple)):
        if not value:
            return None
        if any(isinstance(t, Tensor) for t in value):
            return (ctypes.c_void_p * len(value))(*(t and t.handle for t in value))
        return ((ctypes.c_double if isinstance(value[0], float) else ctypes.c_int64) * len(value))(*value)
    return value
