use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorView};
use safetensors::{Dtype, SafeTensors};

/// A packed array.
#[derive(Clone, Debug)]
pub(crate) struct Tensor<T> {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<T>,
}

impl<T> Tensor<T> {
    /// The shape with axes of size 1 put before it.
    ///
    /// # Panics
    /// If there are more than `N` axes.
    pub(crate) fn shape<const N: usize>(&self) -> [usize; N] {
        let mut shape = [1; N];
        let missing = N.checked_sub(self.shape.len()).expect("a tensor of too many axes");
        shape[missing..].copy_from_slice(&self.shape);
        shape
    }
}

/// A pair of files in `tests/data`: tensors, and JSON about them.
pub(crate) struct Golden {
    tensors: Vec<u8>,
    metadata: Metadata,
    pub(crate) json: serde_json::Value,
}

impl Golden {
    /// Reads `<name>.safetensors` and `<name>.json`.
    pub(crate) fn load(name: &str) -> Self {
        let read = |extension: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name).with_extension(extension);
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let json = serde_json::from_slice(&read("json")).expect("golden JSON parses");
        let mut tensors = read("safetensors");
        let (header, metadata) = SafeTensors::read_metadata(&tensors).expect("golden tensors parse");
        tensors.drain(..size_of::<u64>() + header);
        Self { tensors, metadata, json }
    }

    /// The list `cases` of the JSON file.
    pub(crate) fn cases(&self) -> &[serde_json::Value] {
        self.json["cases"].as_array().expect("a list of cases")
    }

    fn tensor(&self, key: &str) -> Option<TensorView<'_>> {
        let info = self.metadata.info(key)?;
        let (start, end) = info.data_offsets;
        Some(TensorView::new(info.dtype, info.shape.clone(), &self.tensors[start..end]).expect("golden tensors fit"))
    }

    /// Type of a tensor, or `None` if there is none of that name.
    pub(crate) fn dtype(&self, key: &str) -> Option<Dtype> {
        self.tensor(key).map(|tensor| tensor.dtype())
    }

    fn read<T, const BYTES: usize>(&self, key: &str, dtype: Dtype, convert: impl Fn([u8; BYTES]) -> T) -> Tensor<T> {
        let tensor = self.tensor(key).unwrap_or_else(|| panic!("no golden tensor {key}"));
        assert_eq!(tensor.dtype(), dtype, "{key}");
        let (elements, rest) = tensor.data().as_chunks::<BYTES>();
        assert!(rest.is_empty(), "{key}");
        Tensor { shape: tensor.shape().to_vec(), data: elements.iter().map(|&bytes| convert(bytes)).collect() }
    }

    pub(crate) fn f32(&self, key: &str) -> Tensor<f32> {
        self.read(key, Dtype::F32, f32::from_le_bytes)
    }

    pub(crate) fn f16(&self, key: &str) -> Tensor<f16> {
        self.read(key, Dtype::F16, f16::from_le_bytes)
    }

    pub(crate) fn bf16(&self, key: &str) -> Tensor<bf16> {
        self.read(key, Dtype::BF16, bf16::from_le_bytes)
    }

    pub(crate) fn i64(&self, key: &str) -> Tensor<i64> {
        self.read(key, Dtype::I64, i64::from_le_bytes)
    }

    pub(crate) fn i32(&self, key: &str) -> Tensor<i32> {
        self.read(key, Dtype::I32, i32::from_le_bytes)
    }

    /// Stored as bytes of 0 and 1.
    pub(crate) fn bool(&self, key: &str) -> Tensor<bool> {
        self.read(key, Dtype::U8, |[byte]| byte != 0)
    }
}
