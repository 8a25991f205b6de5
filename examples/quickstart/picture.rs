//! Heat maps of attention weights as an SVG file.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use crate::heads::HeadMaps;
use crate::heat_map::{Area, Drawn, INK, LABEL_SIZE, TITLE_SIZE, color_of, frame, label, label_upward, room, scale};
use crate::minilm::MiniLm;

/// Everything in pixels, whole ones, so that no seam shows between cells.
const CELL: i32 = 16;
const GAP: i32 = 18;
const HEADER: i32 = 66;
/// Heads in a row; the column after them has the single head and the scale.
const COLUMNS: i32 = 4;
const MARK: RGBColor = RGBColor(200, 30, 30);

/// Where the parts of a heat map are.
#[derive(Clone, Copy)]
struct Panel {
    /// Room for the labels at the left and at the top.
    labels: i32,
    /// Side of the map.
    side: i32,
}

impl Panel {
    fn new(tokens: &[String]) -> Self {
        Self { labels: room(tokens, LABEL_SIZE), side: CELL * tokens.len() as i32 }
    }

    fn width(self) -> i32 {
        self.labels + self.side + GAP
    }

    fn height(self) -> i32 {
        TITLE_SIZE + 6 + self.labels + self.side + GAP
    }

    /// Corner of the panel in this column and row of the picture.
    fn corner(self, column: i32, row: i32) -> (i32, i32) {
        (GAP + column * self.width(), HEADER + row * self.height())
    }

    /// Corner of the map in a panel.
    fn map(self, (x, y): (i32, i32)) -> (i32, i32) {
        (x + self.labels, y + TITLE_SIZE + 6 + self.labels)
    }
}

/// Draws one sentence: a map for each head, and beside them that of the single head.
pub(crate) fn draw(
    path: &Path,
    many: &HeadMaps,
    one: &HeadMaps,
    model: &MiniLm,
    sentence: usize,
    word: &str,
) -> Result<(), Box<dyn Error>> {
    let tokens = &model.tokens[sentence];
    let panel = Panel::new(tokens);
    let rows = (many.num_heads() as i32 + COLUMNS - 1) / COLUMNS;
    let size = (2 * GAP + (COLUMNS + 1) * panel.width(), HEADER + rows * panel.height() + GAP);
    let area = SVGBackend::new(path, (size.0 as u32, size.1 as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    header(&area, model, sentence, word)?;

    let marked = tokens.iter().position(|token| token == word);
    let map = |corner, title: &str, maps: &HeadMaps, head: usize| {
        heat_map(&area, panel, corner, title, tokens, marked, |query| maps.row(sentence, head, query))
    };
    for head in 0..many.num_heads() {
        let at = head as i32;
        map(panel.corner(at % COLUMNS, at / COLUMNS), &format!("head {head}"), many, head)?;
    }
    map(panel.corner(COLUMNS, 0), &format!("one head of {}", model.width), one, 0)?;
    scale(&area, panel.map(panel.corner(COLUMNS, 1)), panel.side)?;
    let (x, y) = panel.map(panel.corner(COLUMNS, 2));
    let comparison = [
        "One head: the same queries,",
        "keys and values, with each",
        "token's heads taken as one",
        "vector under one softmax.",
    ];
    for (line, text) in comparison.into_iter().enumerate() {
        label(&area, (x, y + 20 * line as i32), text, TITLE_SIZE, INK, (HPos::Left, VPos::Center))?;
    }
    area.present()?;
    Ok(())
}

fn header(area: &Area<'_>, model: &MiniLm, sentence: usize, word: &str) -> Drawn {
    let MiniLm { layer, num_heads, sentences, .. } = model;
    let title = format!("Attention of {num_heads} heads: layer {layer} of all-MiniLM-L6-v2, computed by polyhead");
    let text = format!("\u{201c}{}\u{201d}", sentences[sentence]);
    let how = format!("Rows attend to columns; the row of \u{201c}{word}\u{201d} is framed.");
    label(area, (GAP, 20), &title, 18, INK, (HPos::Left, VPos::Center))?;
    label(area, (GAP, 44), &format!("{text}  {how}"), TITLE_SIZE, INK, (HPos::Left, VPos::Center))
}

fn heat_map<'a>(
    area: &Area<'_>,
    panel: Panel,
    corner: (i32, i32),
    title: &str,
    tokens: &[String],
    marked: Option<usize>,
    row: impl Fn(usize) -> &'a [f32],
) -> Drawn {
    let (left, top) = panel.map(corner);
    let middle = left + panel.side / 2;
    label(area, (middle, corner.1 + TITLE_SIZE / 2), title, TITLE_SIZE, INK, (HPos::Center, VPos::Center))?;
    for (i, token) in tokens.iter().enumerate() {
        let along = CELL * i as i32 + CELL / 2;
        let color = if marked == Some(i) { MARK } else { INK };
        label(area, (left - 4, top + along), token, LABEL_SIZE, color, (HPos::Right, VPos::Center))?;
        label_upward(area, (left + along, top - 4), token, LABEL_SIZE, color)?;
    }
    for query in 0..tokens.len() {
        for (key, &weight) in row(query).iter().enumerate() {
            let (x, y) = (left + CELL * key as i32, top + CELL * query as i32);
            area.draw(&Rectangle::new([(x, y), (x + CELL, y + CELL)], color_of(weight).filled()))?;
        }
    }
    frame(area, (left, top), (panel.side, panel.side), INK)?;
    if let Some(query) = marked {
        frame(area, (left, top + CELL * query as i32), (panel.side, CELL), MARK)?;
    }
    Ok(())
}
