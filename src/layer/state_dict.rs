//! Named tensors: what a checkpoint holds of a layer.

use std::collections::BTreeMap;

use crate::{Element, Error, Result};

/// A packed, row-major array.
///
/// ```
/// use polyhead::layer::Tensor;
/// let tensor = Tensor { shape: vec![2, 3], data: vec![0.5f32; 6] };
/// # let _ = tensor;
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensor<T> {
    /// Sizes of the axes.
    pub shape: Vec<usize>,
    /// Elements; as many as the product of the shape.
    pub data: Vec<T>,
}

/// Tensors by their names, as PyTorch's `state_dict`.
///
/// ```
/// use polyhead::layer::{Config, MultiHeadAttention, StateDict, Tensor};
/// let mut state = StateDict::new();
/// state.insert("attn.in_proj_weight", Tensor { shape: vec![3 * 4, 4], data: vec![0.1f32; 48] });
/// state.insert("attn.out_proj.weight", Tensor { shape: vec![4, 4], data: vec![0.1f32; 16] });
/// let layer = MultiHeadAttention::from_state_dict(Config::new(4, 2), &state, "attn.")?;
/// assert_eq!(layer.to_state_dict("attn."), state);
/// # Ok::<(), polyhead::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateDict<T> {
    tensors: BTreeMap<String, Tensor<T>>,
}

impl<T: Element> StateDict<T> {
    /// An empty one.
    pub fn new() -> Self {
        Self { tensors: BTreeMap::new() }
    }

    /// Puts a tensor in, in the place of one of the same name.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor<T>) {
        self.tensors.insert(name.into(), tensor);
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<&Tensor<T>> {
        self.tensors.get(name)
    }

    /// All tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor<T>)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The tensors of a safetensors file whose names begin with `prefix`, converted to `T`: f32, f16 and bf16 exactly where `T`
    /// has the precision, else to the nearest value.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if the bytes are no such file, [`Error::TensorType`] for a tensor of another type.
    ///
    /// ```
    /// use polyhead::layer::{StateDict, Tensor};
    /// use safetensors::{Dtype, tensor::TensorView};
    /// let bytes: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    /// let view = TensorView::new(Dtype::F32, vec![2], &bytes).unwrap();
    /// let file = safetensors::serialize([("encoder.bias", view)], None).unwrap();
    /// let state = StateDict::<half::bf16>::from_safetensors(&file, "encoder.")?;
    /// assert_eq!(state.get("encoder.bias").unwrap().data, [half::bf16::ONE, half::bf16::from_f32(2.0)]);
    /// # Ok::<(), polyhead::Error>(())
    /// ```
    #[cfg(feature = "safetensors")]
    pub fn from_safetensors(file: &[u8], prefix: &str) -> Result<Self> {
        use half::{bf16, f16};
        use safetensors::{Dtype, SafeTensors};

        fn read<T: Element, const N: usize>(data: &[u8], convert: impl Fn([u8; N]) -> f32) -> Vec<T> {
            data.as_chunks::<N>().0.iter().map(|&bytes| T::from_f32_nearest(convert(bytes))).collect()
        }

        let file = SafeTensors::deserialize(file).map_err(|error| Error::Checkpoint { reason: error.to_string() })?;
        let mut state = Self::new();
        for (name, tensor) in file.iter().filter(|(name, _)| name.starts_with(prefix)) {
            let data = match tensor.dtype() {
                Dtype::F32 => read(tensor.data(), f32::from_le_bytes),
                Dtype::F16 => read(tensor.data(), |bytes| f16::from_le_bytes(bytes).to_f32()),
                Dtype::BF16 => read(tensor.data(), |bytes| bf16::from_le_bytes(bytes).to_f32()),
                other => return Err(Error::TensorType { name: name.to_owned(), actual: format!("{other:?}") }),
            };
            state.insert(name, Tensor { shape: tensor.shape().to_vec(), data });
        }
        Ok(state)
    }
}

/// Takes a layer's tensors from a state dict, and sees that none is left.
pub(super) struct Reader<'a, T> {
    state: &'a StateDict<T>,
    prefix: &'a str,
    taken: Vec<String>,
}

impl<'a, T: Element> Reader<'a, T> {
    pub(super) fn new(state: &'a StateDict<T>, prefix: &'a str) -> Self {
        Self { state, prefix, taken: Vec::new() }
    }

    pub(super) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.state.get(&self.name(name)).is_some()
    }

    /// A tensor of any shape.
    pub(super) fn any(&mut self, name: &str, expected: &[usize]) -> Result<&'a Tensor<T>> {
        let name = self.name(name);
        let Some(tensor) = self.state.get(&name) else {
            return Err(Error::MissingTensor { name, expected: expected.to_vec() });
        };
        let len = tensor.shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        if len != Some(tensor.data.len()) {
            // The elements are not those of the shape.
            let (expected, actual) = (tensor.shape.clone(), vec![tensor.data.len()]);
            return Err(Error::TensorShape { name, expected, actual });
        }
        self.taken.push(name);
        Ok(tensor)
    }

    /// A tensor of this shape.
    pub(super) fn tensor(&mut self, name: &str, expected: &[usize]) -> Result<&'a [T]> {
        let tensor = self.any(name, expected)?;
        if tensor.shape != expected {
            let (expected, actual) = (expected.to_vec(), tensor.shape.clone());
            return Err(Error::TensorShape { name: self.name(name), expected, actual });
        }
        Ok(&tensor.data)
    }

    /// That every tensor under the prefix has been taken.
    pub(super) fn finish(self) -> Result<()> {
        let left =
            |(name, _): &(&str, _)| name.starts_with(self.prefix) && !self.taken.iter().any(|taken| taken == name);
        match self.state.iter().find(left) {
            Some((name, tensor)) => Err(Error::UnexpectedTensor { name: name.to_owned(), shape: tensor.shape.clone() }),
            None => Ok(()),
        }
    }
}
